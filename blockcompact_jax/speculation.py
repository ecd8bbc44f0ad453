"""Acceptance of drafted tokens: greedy, and lossless sampling by rejection.

Pure functions: the caller gives probabilities and uniform draws, so that a retried request can
reuse its draws. With sampling, the tokens follow the target distribution exactly, whatever the
draft.
"""

# pyright: reportUnknownMemberType=false

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32, Int32

from .errors import CompactionError
from .ids import HOLE, AnyArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The tokens one verification round yields.

    Attributes:
        tokens: Accepted draft tokens, then one token of the target. HOLE padded.
        num_tokens: Filled places of `tokens`: num_accepted + 1. Shape ().
        num_accepted: Draft tokens accepted. Shape ().
    """

    tokens: Int32[Array, " draft_plus_one"]
    num_tokens: Int32[Array, ""]
    num_accepted: Int32[Array, ""]


def accept_greedy(
    draft_tokens: Int32[AnyArray, " draft"], target_argmax: Int32[AnyArray, " draft_plus_one"]
) -> Acceptance:
    """Accepts draft tokens as long as each is the target's own choice.

    Args:
        draft_tokens: Drafted tokens.
        target_argmax: The target's choice after the prefix and after each draft token.

    Raises:
        CompactionError: If `target_argmax` is not one longer than `draft_tokens`.
    """
    num_draft = draft_tokens.shape[0]
    _check_shape("target_argmax", target_argmax, (num_draft + 1,))
    draft = jnp.asarray(draft_tokens, jnp.int32)
    target = jnp.asarray(target_argmax, jnp.int32)
    is_accepted = draft == target[:num_draft]
    num_accepted = _count_leading(is_accepted)
    return _join(draft, num_accepted, target[num_accepted])


def accept_sampled(
    draft_tokens: Int32[AnyArray, " draft"],
    draft_probs: Float32[AnyArray, "draft vocab"],
    target_probs: Float32[AnyArray, "draft_plus_one vocab"],
    accept_uniforms: Float32[AnyArray, " draft"],
    final_uniform: Float32[AnyArray, ""],
) -> Acceptance:
    """Accepts draft tokens by the rejection rule, then draws one token of the target.

    Token j is accepted iff accept_uniforms[j] < min(1, p_j / q_j), that is iff u · q_j < p_j. After
    the first rejection the token is drawn from the normalised max(p - q, 0) of that place; after
    none, from the target's last distribution.

    Args:
        draft_tokens: Tokens drawn from `draft_probs`.
        draft_probs: The draft's distributions q, as they were sampled from (temperature, top-p).
        target_probs: The target's distributions p, after the same processing.
        accept_uniforms: Independent draws in [0, 1), one per draft token.
        final_uniform: One more draw, for the last token.

    Raises:
        CompactionError: If a shape or dtype does not fit.
    """
    num_draft = draft_tokens.shape[0]
    vocab = target_probs.shape[-1]
    _check_shape("draft_probs", draft_probs, (num_draft, vocab))
    _check_shape("target_probs", target_probs, (num_draft + 1, vocab))
    _check_shape("accept_uniforms", accept_uniforms, (num_draft,))
    named = {
        "draft_probs": draft_probs,
        "target_probs": target_probs,
        "accept_uniforms": accept_uniforms,
        "final_uniform": final_uniform,
    }
    for name, array in named.items():
        if array.dtype != np.float32:
            raise CompactionError(f"`{name}` has dtype {array.dtype}; cast it to float32.")
    draft = jnp.asarray(draft_tokens, jnp.int32)
    q, p = jnp.asarray(draft_probs), jnp.asarray(target_probs)
    places = jnp.arange(num_draft)
    is_accepted = jnp.asarray(accept_uniforms) * q[places, draft] < p[places, draft]
    num_accepted = _count_leading(is_accepted)
    padded_q = jnp.concatenate([q, jnp.zeros((1, vocab), jnp.float32)])
    residual = jnp.maximum(p[num_accepted] - padded_q[num_accepted], 0.0)
    # Where p equals q up to rounding, a rejection may find no residual: draw from p itself.
    residual = jnp.where(jnp.any(residual > 0.0), residual, p[num_accepted])
    return _join(draft, num_accepted, sample_from_weights(residual, jnp.asarray(final_uniform)))


def sample_from_weights(
    weights: Float32[AnyArray, " vocab"], uniform: Float32[AnyArray, ""]
) -> Int32[Array, ""]:
    """Returns the first token whose cumulative weight exceeds uniform · total.

    Args:
        weights: Unnormalised, at least 0; not all 0.
        uniform: A draw in [0, 1).
    """
    cumulative = jnp.cumsum(jnp.asarray(weights))
    token = jnp.sum(cumulative <= uniform * cumulative[-1], dtype=jnp.int32)
    # Rounding may make uniform · total reach the total: stay on the last possible token.
    last_possible = weights.shape[0] - 1 - jnp.argmax((weights > 0)[::-1])
    return jnp.minimum(token, last_possible.astype(jnp.int32))


def _count_leading(is_accepted: Array) -> Int32[Array, ""]:
    return jnp.sum(jnp.cumprod(is_accepted.astype(jnp.int32)), dtype=jnp.int32)


def _join(draft: Array, num_accepted: Array, last_token: Array) -> Acceptance:
    places = jnp.arange(draft.shape[0] + 1, dtype=jnp.int32)
    padded = jnp.concatenate([draft, jnp.full((1,), HOLE, jnp.int32)])
    tokens = jnp.where(places < num_accepted, padded, HOLE)
    tokens = jnp.where(places == num_accepted, last_token, tokens)
    return Acceptance(tokens=tokens, num_tokens=num_accepted + 1, num_accepted=num_accepted)


def _check_shape(name: str, array: AnyArray, expected: tuple[int, ...]) -> None:
    if array.shape != expected:
        raise CompactionError(f"`{name}` has shape {array.shape}; expected {expected}.")
