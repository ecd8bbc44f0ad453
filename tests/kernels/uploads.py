"""Uploads between the pools of the `pair` fixture, and what they have to leave."""

import numpy as np

from blockcompact_jax import kernels
from blockcompact_jax.kernels import Layout

from .helpers import column


class Lease:
    """Something that can be watched."""


def start(pair, *, source=(0,), target=(1,), layer=0, ord_plain=None, **options):
    plain, packed, _, _ = pair
    return kernels.start_pool_upload(
        packed.current_ord(),
        plain.current_ord() if ord_plain is None else ord_plain,
        layer,
        column(*source),
        column(*target),
        packed_pool=packed,
        plain_pool=plain,
        **options,
    )


def after_upload(pair, source, target, layer=0):
    """The plain memory ([layer, block, kv, token, head, dim]) that an upload has to leave."""
    _, _, memory, store = pair
    expected = memory.copy()
    blocks = np.asarray(
        kernels.unpack(store[layer], layout=Layout.AMX, plain_layout=Layout.PLAIN_NHD)
    )
    expected[layer, list(target)] = blocks[list(source)]
    return expected
