"""Guesses from the text itself: what followed the last time these tokens appeared."""

from __future__ import annotations


class NgramLookup:
    """Proposes the tokens that followed the latest earlier occurrence of the newest n-gram.

    A guess costs the draft almost nothing: a forward over a few tokens reads the same weights as a
    forward over one. It never changes what is drafted, only in how many forwards.
    """

    def __init__(self, token_ids: list[int], *, max_ngram: int = 4, min_ngram: int = 2) -> None:
        """Indexes the context.

        Args:
            token_ids: the context.
            max_ngram: longest n-gram looked up; longer ones are tried first.
            min_ngram: shortest n-gram looked up.

        Raises:
            ValueError: unless 1 <= min_ngram <= max_ngram.
        """
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"`min_ngram` is {min_ngram} and `max_ngram` {max_ngram}; expected "
                "1 <= min_ngram <= max_ngram."
            )
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._tokens: list[int] = []
        self._end_by_ngram: dict[tuple[int, ...], int] = {}
        self.extend(token_ids)

    def __len__(self) -> int:
        """Tokens of the context."""
        return len(self._tokens)

    @property
    def newest(self) -> int:
        """The last token of the context."""
        return self._tokens[-1]

    def extend(self, token_ids: list[int]) -> None:
        """Adds confirmed tokens."""
        for token in token_ids:
            # An n-gram is indexed once something follows it: the newest never finds itself.
            end = len(self._tokens)
            for size in self._sizes:
                if size <= end:
                    self._end_by_ngram[tuple(self._tokens[end - size : end])] = end
            self._tokens.append(token)

    def propose(self, drafted: list[int], num_tokens: int) -> list[int]:
        """Guesses what follows the confirmed tokens and `drafted`.

        Args:
            drafted: tokens after the confirmed ones.
            num_tokens: most tokens to guess.

        Returns:
            At most `num_tokens` tokens; none where no n-gram is known.
        """
        if num_tokens <= 0:
            return []
        newest = [*self._tokens[-self._sizes[0] :], *drafted]
        for size in self._sizes:
            if len(newest) < size:
                continue
            end = self._end_by_ngram.get(tuple(newest[-size:]))
            if end is not None:
                return self._tokens[end : end + num_tokens]
        return []
