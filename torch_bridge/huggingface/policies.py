"""Where block scores come from: attention mass, or the recency and random controls."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32

from torch_bridge.huggingface.options import PolicyName

BlockMass = Float32[Array, "row query_head position block"]
BlockScores = Float32[Array, "row *heads block"]
ScoreSource = Callable[[BlockMass], BlockScores]


def score_source(name: PolicyName, *, seed: int) -> ScoreSource:
    """Returns the function that turns recorded attention mass into block scores.

    Args:
        name: "attention" hands the mass on; "recency" prefers newer blocks; "random" prefers any.
            The last two are controls: they ignore the mass.
        seed: seed of "random"; every selection draws anew.
    """
    random = np.random.default_rng(seed)

    def attention(mass: BlockMass) -> BlockScores:
        return mass

    def recency(mass: BlockMass) -> BlockScores:
        num_rows, max_blocks = mass.shape[0], mass.shape[-1]
        return jnp.tile(jnp.arange(max_blocks, dtype=jnp.float32), (num_rows, 1))

    def at_random(mass: BlockMass) -> BlockScores:
        return jnp.asarray(random.random((mass.shape[0], mass.shape[-1]), dtype=np.float32))

    return {"attention": attention, "recency": recency, "random": at_random}[name]
