"""What a runtime compiles, and when."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from blockcompact_jax.runtime import CompactionRuntime, RuntimeLimits
from blockcompact_jax.selection import SelectionPolicy
from blockcompact_jax.transfer import Pools

from . import builders as b

MAX_BLOCKS = 24
GEOMETRY = b.geometry(((0, 1),))


@pytest.fixture
def compilations():
    """Names of everything that JAX traces, lowers or compiles from here on."""
    events: list[str] = []

    def hear(event: str, _seconds: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(hear)
    yield events
    jax.monitoring.unregister_event_duration_listener(hear)


@pytest.mark.parametrize("resident_margin", [0.0, 0.5], ids=["checked on host", "compiled check"])
def test_COM_2_no_step_after_the_warm_up_compiles(compilations, resident_margin):
    """COM-2: steps that change lists, change nothing or graduate blocks, in any order."""
    runtime = CompactionRuntime(
        geometry=GEOMETRY,
        selection=SelectionPolicy(max_want=8, resident_margin=resident_margin),
        limits=RuntimeLimits(
            max_blocks=MAX_BLOCKS, max_unselected_tokens=4 * GEOMETRY.block_tokens
        ),
    )
    shape: Any = SimpleNamespace(num_blocks=runtime.num_physical_blocks, block_bytes=1)
    pool: Any = SimpleNamespace(shape=shape)
    runtime.attach(Pools(packed=pool, resident=pool), mover=lambda rows: None)
    device = jax.local_devices(backend="cpu")[0]
    ascending = np.arange(MAX_BLOCKS, dtype=np.float32)
    by_row = np.tile(ascending, (GEOMETRY.num_rows, 2, 1))
    rising, falling = jax.device_put((by_row, -by_row), device)

    runtime.warm_up(rising)
    assert compilations  # The listener hears.
    compilations.clear()
    steps = [
        # Scores, whole blocks, whether nothing changes.
        (rising, 16, False),
        (rising, 16, True),
        (falling, 16, False),
        (falling, 16, True),
        (rising, 18, False),
        (rising, 18, True),
        (rising, 18, True),
        (falling, 18, False),
        (rising, 20, False),
    ]
    for place, (scores, num_blocks, is_zero) in enumerate(steps):
        before = runtime.residency
        runtime.reselect(scores, num_tokens=num_blocks * GEOMETRY.block_tokens, budget_blocks=6)
        after = runtime.residency
        assert (after.logical_by_slot is before.logical_by_slot) == is_zero, place
        assert int(after.revisions.selection_revision) == place + 1
        assert compilations == [], place
