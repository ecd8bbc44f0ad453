"""The board of contracts and the page of results, generated from files, never kept by hand."""
