"""What a session records of its course, against the runtime's own state after each selection."""

import base64
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from sessions import make_session

from blockcompact_jax.budget import Budget, OptionError, parse_budget
from blockcompact_jax.calibration import FACTS, read_calibration
from blockcompact_jax.costs import RetainCosts, measured
from blockcompact_jax.errors import CompactionError
from blockcompact_jax.kernels import Layout
from blockcompact_jax.provenance import machine
from blockcompact_jax.reselection import OnlineReselection
from blockcompact_jax.round_curves import RoundSample
from torch_bridge.huggingface.calibrate import calibrate, calibration_facts
from torch_bridge.huggingface.options import RunOptions
from torch_bridge.huggingface.sampling import Sampler
from torch_bridge.huggingface.speculate import decode_speculative

NUM_NEW = 40


def new_session(model, **options):
    return make_session(
        model,
        budget=Budget(fraction=0.4),
        policy="random",
        block_tokens=16,
        layout=Layout.VEC,
        **options,
    )


def decode(session, context):
    sampler = Sampler(temperature=0, seed=0)
    return decode_speculative(
        session,
        context,
        first_token=sampler.choose(session.prefill(context)),
        num_tokens=NUM_NEW,
        sampler=sampler,
        eos_token_ids=frozenset(),
        on_tokens=lambda _: None,
    )


class Watcher:
    """Reads the residency after each selection, by itself."""

    def __init__(self, session):
        self.session, self.states, self.uploads = session, [], []
        runtime, plain = session.runtime, session.runtime.reselect
        move = runtime._move

        def watched(upload):
            rows = np.asarray(upload.layer_row)
            self.uploads.append(
                [int((rows == row).sum()) for row in range(session.geometry.num_rows)]
            )
            move(upload)

        def reselect(*arguments, **options):
            tables = plain(*arguments, **options)
            residency = runtime.residency
            held = np.asarray(residency.logical_by_slot)
            valid = np.asarray(residency.num_valid)
            self.states.append([set(row[:n].tolist()) for row, n in zip(held, valid, strict=True)])
            return tables

        runtime.reselect, runtime._move = reselect, watched


def blocks_of(text):
    bits = np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), bitorder="little")
    return set(np.nonzero(bits)[0].tolist())


def test_each_selection_is_recorded_as_it_was_committed(model, token_ids):
    """Every layer's resident blocks, and what came, stayed and went; rounds add up to the run."""
    with new_session(model, has_course=True) as session:
        watcher = Watcher(session)
        decoded = decode(session, token_ids[:200])
        course = json.loads(json.dumps(session.course.to_dict()))
        total = session.runtime.metrics
        num_selections = session.runtime.num_selections
    selections = course["selections"]
    assert len(selections) == num_selections == len(watcher.states) >= 4
    assert course["layers"] == list(session.geometry.full_layers)
    before = [set() for _ in course["layers"]]
    for found, held, uploaded in zip(selections, watcher.states, watcher.uploads, strict=True):
        assert [blocks_of(text) for text in found["resident"]] == held
        assert max(map(max, held)) < found["num_candidate_blocks"] <= found["num_tokens"] // 16
        assert found["num_uploaded"] == uploaded
        assert found["num_kept"] == [len(a & b) for a, b in zip(before, held, strict=True)]
        assert found["num_dropped"] == [len(a - b) for a, b in zip(before, held, strict=True)]
        before = held
    for name in ("h2d_bytes", "table_entries_written", "physical_blocks_released"):
        assert sum(each["metrics"][name] for each in selections) == getattr(total, name)
    rounds = course["rounds"]
    rows = [dict(zip(rounds["columns"], row, strict=True)) for row in rounds["rows"]]
    assert len(rows) == decoded.num_rounds
    for name in ("num_drafted", "num_accepted", "num_gained"):
        assert sum(row[name] for row in rows) == getattr(decoded, name)
    anew = [row["round"] for row in rows if row["action"] == "select anew"]
    assert anew == [each["after_round"] for each in selections[1:]]
    assert anew == list(range(2, len(rows) + 1, 2))
    assert {row["basis"] for row in rows} == {"fixed period"}


def test_nothing_is_recorded_where_nobody_asks(llama, token_ids):
    with new_session(llama) as session:
        decode(session, token_ids[:200])
        assert session.course is None
        assert session.runtime.on_selection is None
        assert session.reselection.rounds == ()


def test_online_the_tokens_stay_and_costs_decide(llama, token_ids):
    """Calibrated costs that make every round worth a selection, and none; the tokens are equal."""
    names = ("table_update", "plan", "wait", "allocator", "kv_move")
    found = {}
    for select_us, last_us in ((1.0, 100.0), (1e12, 10.0)):
        rounds = tuple(
            RoundSample(age_rounds=age, round_us=us, num_gained_tokens=2)
            for age, us in enumerate([10.0, last_us, last_us, last_us, last_us])
            for _ in range(2)
        )
        online = OnlineReselection(
            max_period_rounds=4,
            costs=(RetainCosts(**{name: measured(select_us) for name in names}),) * 40,
            rounds=rounds * 20,
        )
        with new_session(llama, online=online, has_course=True) as session:
            tokens = decode(session, token_ids[:200]).tokens
            course = session.course.to_dict()["rounds"]
        place = course["columns"].index("basis")
        found[select_us] = (tokens, [row[place] for row in course["rows"]])
        is_anew = [row[course["columns"].index("action")] for row in course["rows"]]
        if select_us == 1.0:
            assert is_anew[:6] == ["select anew"] * 6
        else:
            assert is_anew[:4] == ["go on"] * 3 + ["select anew"]
    (often, often_basis), (rarely, rarely_basis) = found.values()
    assert often == rarely
    assert often_basis[:6] == ["costs"] * 6
    assert rarely_basis[:4] == ["costs"] * 3 + ["longest period"]


@pytest.fixture(scope="module")
def calibration(llama, tmp_path_factory):
    """A file as the command writes it."""
    options = RunOptions(budget=parse_budget("3b"), num_draft_tokens=3, num_lookup_tokens=0)
    loaded = SimpleNamespace(model=llama, name="tiny", max_positions=1024)
    context = [place % 97 for place in range(200)]
    found = calibrate(options, loaded, context, num_samples=2, horizon_steps=4, num_rounds=34)
    path = tmp_path_factory.mktemp("costs") / "calibration.json"
    facts = calibration_facts(options, 200)
    path.write_text(json.dumps({**facts, **found.to_dict(), "machine": machine()}))
    return options, found, path


def test_a_calibration_measures_rounds_that_a_run_starts_from(calibration):
    """CST-1: what a file says is read back term by term, unmeasured ones as such."""
    options, found, path = calibration
    ages = [each.age_rounds for each in found.rounds]
    assert sorted(ages) == sorted([*range(16), *range(16), 0, 1])
    assert found.prediction is not None
    assert len(found.prediction.us_per_token) == 16
    online = read_calibration(path, facts=calibration_facts(options, 200))
    assert online.costs == (found.costs,)
    assert online.rounds == found.rounds
    assert set(calibration_facts(options, 200)) == set(FACTS)


def test_a_calibration_of_something_else_is_refused(calibration, tmp_path):
    options, _, path = calibration
    with pytest.raises(CompactionError, match=r"`context_tokens` 200; this run has 300"):
        read_calibration(path, facts=calibration_facts(options, 300))
    other = replace(options, num_draft_tokens=5)
    with pytest.raises(CompactionError, match="`draft_tokens` 3; this run has 5"):
        read_calibration(path, facts=calibration_facts(other, 200))
    document = json.loads(path.read_text())
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps({**document, "machine": {"processor": "another"}}))
    with pytest.raises(CompactionError, match=r"`machine` {'processor': 'another'}"):
        read_calibration(changed, facts=calibration_facts(options, 200))
    del document["rounds"]
    changed.write_text(json.dumps(document))
    with pytest.raises(CompactionError, match="no usable 'rounds'"):
        read_calibration(changed, facts=calibration_facts(options, 200))
    with pytest.raises(OptionError, match="`reselect-every auto`"):
        RunOptions(costs_file=path)
