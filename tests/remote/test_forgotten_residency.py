"""What a remote session keeps where a lost server or rank takes all that was resident with it."""

import torch

from blockcompact_jax.transfer import Pools
from torch_bridge.huggingface.remote import RemoteSession
from torch_bridge.huggingface.session import CompactionSession

from .test_remote_session import sides
from .tiny import tiny_model


def test_MET_1_what_was_counted_outlives_the_residency():
    """MET-1: selections are counted over a whole run; the first one after a loss is a full plan."""
    context = torch.randint(0, 97, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    with CompactionSession(**sides(tiny_model("llama")), has_course=True) as session:
        session.prefill(context)
        first = session.runtime.last_booked
        session.reselect()
        RemoteSession._forget_residency(session)
        assert not session.runtime.has_selection
        session.runtime.attach(
            Pools(packed=session.full.packed_pool, resident=session.resident.pool)
        )
        session.reselect()
        assert session.runtime.has_selection
        assert session.runtime.last_booked.h2d_bytes == first.h2d_bytes > 0
        assert session.runtime.metrics.h2d_bytes == 2 * first.h2d_bytes
        assert session.runtime.num_selections == session.course.to_dict()["num_selections"] == 3
