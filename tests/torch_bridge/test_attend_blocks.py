"""What `attend_blocks` refuses: the native call has addresses only, and would read other memory."""

import numpy as np
import pytest
import torch

from blockcompact_jax.kernels import AttendSegment
from torch_bridge.attend import attend_blocks
from torch_bridge.dlpack import aligned_zeros
from torch_bridge.pools import KVShape


@pytest.fixture
def segments():
    shape = KVShape(num_rows=1, num_kv_heads=2, block_tokens=4, head_dim=8, dtype=torch.bfloat16)
    pool = shape.register_plain(aligned_zeros(1, 2, 2, 12, 8, dtype=torch.bfloat16), 3)
    table = np.arange(3, dtype=np.int32)
    yield [AttendSegment(pool, pool.current_ord(), 0, table, 12)]
    pool.close()


def tensors(**changes):
    made = {
        "query": torch.ones(4, 2, 8, dtype=torch.bfloat16),
        "out": torch.full((4, 2, 8), 7, dtype=torch.bfloat16),
        "mass": torch.full((4, 2, 3), 7.0),
    }
    return {name: changes[name](made[name]) if name in changes else made[name] for name in made}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.Tensor.float}, "`query` is torch.float32"),
        ({"query": torch.Tensor.half}, "`query` is torch.float16"),
        ({"query": lambda x: x.repeat(1, 1, 2)}, "`query` is .* expected torch.bfloat16 .* 8]"),
        ({"query": lambda x: x.mT.contiguous().mT}, "last axis contiguous"),
        ({"out": torch.Tensor.float}, "`out` is torch.float32"),
        ({"out": lambda x: x[:, :1]}, "`out` is .* expected .* as `query`"),
        ({"mass": torch.Tensor.bfloat16}, "`mass` is torch.bfloat16"),
        ({"mass": lambda x: x[:2]}, "`mass` is .* expected torch.float32"),
    ],
)
def test_what_is_read_as_something_else_is_refused(segments, changes, message):
    given = tensors(**changes)
    with pytest.raises(ValueError, match=message):
        attend_blocks(given["query"], segments, out=given["out"], mass=given["mass"], scale=1.0)
    assert (given["out"] == 7).all()
    assert (given["mass"] == 7).all()


def test_what_fits_is_attended_to(segments):
    given = tensors()
    attend_blocks(given["query"], segments, out=given["out"], mass=given["mass"], scale=1.0)
    assert not given["out"].any()  # all values are zeros
    torch.testing.assert_close(given["mass"].sum(-1), torch.ones(4, 2))
