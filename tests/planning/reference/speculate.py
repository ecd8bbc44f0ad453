"""Exact acceptance probabilities with rational numbers."""

from fractions import Fraction
from itertools import product


def output_distribution(draft_probs, target_probs):
    """Returns the exact probability of each emitted token sequence, by the rejection rule.

    Args:
        draft_probs: Fractions [draft][vocab], independent of the prefix.
        target_probs: Fractions [draft + 1][vocab], independent of the prefix.
    """
    vocab = range(len(target_probs[0]))
    out = {}
    for draft in product(vocab, repeat=len(draft_probs)):
        weight = Fraction(1)
        for j, token in enumerate(draft):
            weight *= draft_probs[j][token]
        if weight == 0:
            continue
        for j, token in enumerate(draft):
            p, q = target_probs[j][token], draft_probs[j][token]
            accept = min(Fraction(1), p / q)
            rest = [max(target_probs[j][t] - draft_probs[j][t], Fraction(0)) for t in vocab]
            if accept < 1:
                for t in vocab:
                    _add(out, (*draft[:j], t), weight * (1 - accept) * rest[t] / sum(rest))
            weight *= accept
        for t in vocab:
            _add(out, (*draft, t), weight * target_probs[-1][t])
    return out


def _add(out, key, weight):
    if weight:
        out[key] = out.get(key, Fraction(0)) + weight
