"""The simulator: no violation, every mutant caught, and a caught seed replays exactly."""

import dataclasses

import numpy as np
import pytest

from blockcompact_jax.errors import ResultCode
from blockcompact_jax.ledger.state import LedgerShape
from blockcompact_jax.simulation.check import check, record
from blockcompact_jax.simulation.explore import Scenario, explore
from blockcompact_jax.simulation.mutants import BROKEN_RULES, MUTANTS, hunt
from blockcompact_jax.simulation.world import FAULTS, World, WorldOptions

SHAPE = LedgerShape(max_requests=3, max_operations=6, max_slots=8, num_ranks=2)
OPTIONS = WorldOptions(shape=SHAPE)
NUM_WORLDS, NUM_STEPS = 64, 300


@pytest.fixture(scope="module")
def trace():
    return record(tuple(range(NUM_WORLDS)), NUM_STEPS, OPTIONS)


def test_COM_8_OWN_1_the_ledger_passes_all_worlds(trace):
    """COM-1 … COM-8, OWN-1, OWN-3, UPL-4: answers, states and invariants, under all faults."""
    violations, _ = check(trace, OPTIONS)
    assert violations == ()
    assert trace.breaches == ()
    share = trace.num_invalid / trace.codes.size
    assert 0.05 < share < 0.15


def test_the_worlds_reach_every_code(trace):
    """A simulation that never sees a rule proves nothing about it."""
    seen = {ResultCode(int(code)) for code in np.unique(trace.codes)}
    ledger_codes = {code for code in ResultCode if code >= ResultCode.EVENT_OUT_OF_RANGE}
    assert ledger_codes | {ResultCode.OK, ResultCode.STALE_PLAN} == seen


def test_every_mutant_is_caught_and_its_seed_replays(trace):
    """A broken rule is seen; the named world alone, run again, shows it at the same step."""
    caught = hunt(trace, OPTIONS)
    assert [name for name, mutant in caught.items() if mutant.seed is None] == []
    for name, mutant in caught.items():
        alone = record((mutant.seed,), mutant.step + 1, OPTIONS)
        (violation,), _ = check(alone, OPTIONS, apply=MUTANTS[name])
        assert (violation.seed, violation.step) == (mutant.seed, mutant.step), name
        assert violation.problem == mutant.problem or "state differs" in violation.problem


def test_a_seed_is_a_world():
    """The same seed gives the same events and answers; another seed others."""
    first, second = (record((7, 8), 100, OPTIONS) for _ in range(2))
    assert first.rows.tobytes() == second.rows.tobytes()
    assert first.values.tobytes() == second.values.tobytes()
    assert first.rows[:, 0].tobytes() != first.rows[:, 1].tobytes()
    assert record((8,), 100, OPTIONS).rows[:, 0].tobytes() == first.rows[:, 1].tobytes()


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(
    "faults", [frozenset(), *(frozenset({fault}) for fault in FAULTS)], ids=str
)
def test_each_fault_alone_is_survived(faults, num_ranks):
    """COM-3, COM-7, COM-8: with no fault, and each by itself, on one rank and on three."""
    options = WorldOptions(shape=dataclasses.replace(SHAPE, num_ranks=num_ranks), faults=faults)
    trace = record(tuple(range(8)), 100, options)
    violations, _ = check(trace, options)
    assert violations + trace.breaches == ()


def test_a_world_sees_a_copy_into_a_slot_that_was_given_away():
    """The memory of a world is not blind to what a ledger without RETIRING would do."""
    world = World(0, OPTIONS)
    while not world._running[0]:
        world.step()
    number = next(iter(world._running[0]))
    world.model.slots[number].free()
    world._land(0, number)
    assert f"landed on rank 0 in slot {number}, which is free" in world.breaches[0]


SMALL = LedgerShape(max_requests=2, max_operations=2, max_slots=2, num_ranks=2)


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario(shape=SMALL, slots_by_operation=(1, 0)), marks=pytest.mark.slow),
        Scenario(shape=SMALL, slots_by_operation=(1,), max_restarts=1),
    ],
    ids=["two operations", "a restart"],
)
def test_COM_8_every_interleaving_of_a_small_ledger(scenario):
    """COM-7, COM-8, OWN-1, UPL-4: every reachable state holds, and leads back to an empty pool."""
    found = explore(scenario)
    assert found.problems == {}
    assert found.num_states > 1000
    assert found.num_events > found.num_transitions > found.num_states


def test_an_exploration_can_fail():
    """A leak is found without a second ledger: some state does not lead back to an empty pool."""
    scenario = Scenario(shape=SMALL, slots_by_operation=(1,), max_admissions=1)
    found = explore(scenario, rules=BROKEN_RULES["finish_leaks_residents"])
    assert found.problems["only_running_requests_hold_slots"] > 0
    assert found.problems["everything_returns_at_the_end"] > 0
