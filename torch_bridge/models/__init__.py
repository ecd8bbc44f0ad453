"""Real models, ready to run: a registry of short names, fetching, conversion and loading."""
