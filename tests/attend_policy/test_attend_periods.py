"""When vLLM's requests are scored again: what the log says, counted from the mini engine's KV."""

import time

import numpy as np
import pytest

from blockcompact_jax.budget import parse_budget
from blockcompact_jax.decision_log import read_decision_log
from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.kernels import Layout
from torch_bridge.vllm.compaction import GroupCompaction
from torch_bridge.vllm.config import AttendConfig
from torch_bridge.vllm.drafting import GroupDrafting

from . import mini_engine as mini
from .mini_engine import MiniEngine
from .test_attend_drafting import OneRequest
from .test_attend_engine import NamedRequest


def make_engine(**config):
    compaction = GroupCompaction(
        AttendConfig(budget=parse_budget("3b"), **config),
        geometry=mini.GEOMETRY,
        layer_names=mini.LAYER_NAMES,
        layout=Layout.VEC,
        max_tokens=mini.MAX_BLOCKS * mini.B,
    )
    return MiniEngine(compaction)


def make_drafting(log):
    geometry = ModelGeometry.uniform(
        num_layers=1,
        num_query_heads=2,
        num_kv_heads=1,
        head_dim=32,
        block_tokens=32,
        dtype="float32",
        layout="vec",
    )
    return GroupDrafting(
        AttendConfig(
            policy="lossless",
            budget=parse_budget("3b"),
            reselect_every_tokens="auto",
            decision_log=str(log),
        ),
        geometry=geometry,
        layer_names=["model.layers.0.attn"],
        layout=Layout.VEC,
        max_tokens=2048,
    )


def missed(masses, selected, num_candidates):
    """Means over layers of the mass in candidate blocks: left out, and at least left out."""
    total = at_best = 0.0
    for mass, blocks in zip(masses, selected, strict=True):
        shares = [
            float(mass[block * mini.B : (block + 1) * mini.B].sum())
            for block in range(num_candidates)
        ]
        total += sum(share for block, share in enumerate(shares) if block not in blocks)
        at_best += sum(sorted(shares)[: len(shares) - len(blocks)])
    return total / len(masses), at_best / len(masses)


@pytest.mark.parametrize("every", [5, "auto"])
def test_CST_2_every_decision_says_what_the_ended_selection_missed(tmp_path, every):
    """CST-2: the mass of the newest query, from all KV of the request, token by token."""
    log = tmp_path / "decisions.jsonl"
    engine = make_engine(reselect_every_tokens=every, decision_log=str(log))
    engine.admit(0, 50)
    for _ in range(1 + 40):
        engine.step()
    facts, rows = read_decision_log(log)
    assert (facts["engine"], facts["policy"], facts["budget"]) == ("vllm", "attend", "3b")
    assert {row["group"] for row in rows} == {mini.LAYER_NAMES[0]}
    known, before = NamedRequest(0, "3b", 1), 51
    for length in [51, *(row["num_tokens"] for row in rows)]:
        masses = [
            known._attend(layer, length, range(length))[1].mean(0) for layer in range(mini.LAYERS)
        ]
        held = known.selected and missed(masses, known.selected, known.num_candidates)
        known._select(length, 3, masses)
        if held is not None:
            row = next(row for row in rows if row["num_tokens"] == length)
            assert row["age_tokens"] == length - before
            found = (row["mass_missed"], row["mass_missed_at_best"])
            assert found == pytest.approx(held, abs=1e-4)
            assert row["select_us"] > 0
        before = length
    ages = [row["age_tokens"] for row in rows]
    periods = [1 if every == "auto" else 5, *(row["next_period_tokens"] for row in rows[:-1])]
    assert ages == periods


def test_a_loose_bound_holds_selections_longer_and_longer():
    engine = make_engine(reselect_every_tokens="auto", max_mass_lost=0.9)
    engine.admit(0, 40)
    scored = []
    for _ in range(1 + 52):
        before = engine.compaction.counts.num_scored
        engine.step()
        scored.append(engine.compaction.counts.num_scored > before)
    steps = [number for number, is_scored in enumerate(scored) if is_scored]
    assert np.diff(steps).tolist() == [1, 16, 32], "a fresh one, the first period, and twice it"


def test_CST_2_drafts_choose_by_what_rounds_took_and_gained(tmp_path, monkeypatch):
    """CST-2: ages in rounds, a selection's cost with every term, and fewer tokens with age."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    log = tmp_path / "decisions.jsonl"
    drafting = make_drafting(log)
    request = OneRequest(drafting, first_block=1)
    request.table = np.arange(1, 65, dtype=np.int32)[None]
    computed = 300
    request.step(computed, 1, computed + 2)
    computed += 1
    age, ages, seen = 0, [], 0
    for _ in range(60):
        clock[0] += 0.1  # a round takes as long whatever its age
        request.draft(computed + 1)
        gained = 9 if age == 0 else 2  # a fresh selection has many more drafts accepted
        request.step(computed, 9, computed + 1 + gained)
        computed += gained
        age += 1
        decisions = read_decision_log(log)[1]
        if len(decisions) > seen:
            seen, age = len(decisions), 0
        ages.append(age)
    rows = decisions
    assert [row["age_rounds"] for row in rows] == [
        sum(1 for _ in group) for group in _cycles(ages, len(rows))
    ]
    nothing = ["table_update", "metadata", "wait", "allocator", "kv_move", "avoided_stall"]
    for row in rows:
        assert row["assumed"].split(", ") == nothing, "0 by assumption, not by measurement"
        assert {row[f"{name}_us"] for name in nothing} == {0.0}
        assert row["plan_us"] == row["select_us"] == row["cost_us"] == 0.0
    decided = [row for row in rows if row["basis"] == "costs"]
    assert decided
    for row in decided:
        period, before, after = (
            row[name] for name in ("horizon_rounds", "attention_before_us", "attention_after_us")
        )
        round_us, gained = row["round_us_by_age"], row["gained_tokens_by_age"]
        assert (row["next_period_rounds"], row["unmeasured"]) == (period, "")
        assert before == round_us[period] == pytest.approx(100_000)
        assert after == pytest.approx(sum(round_us[:period]) / period)
        lost = period * before * (1 - sum(gained[:period]) / (period * gained[period]))
        assert row["output_penalty_us"] == pytest.approx(lost)
        assert row["benefit_us"] == pytest.approx(period * (before - after) - lost)
        assert row["margin_us"] == pytest.approx(-0.03 * sum(round_us[:period]))
        assert row["is_retained"] == (row["benefit_us"] > row["cost_us"] + row["margin_us"])
        assert row["is_retained"]
    late = [row["next_period_rounds"] for row in rows[-9:]]
    assert sorted(late)[4] == 1, "a selection is free here, and age costs most of the tokens"


def test_a_step_after_which_nothing_is_drafted_gives_no_round_its_time(tmp_path, monkeypatch):
    """The engine asks for no drafts after some steps; the next round took one step's time."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    log = tmp_path / "decisions.jsonl"
    drafting = make_drafting(log)
    request = OneRequest(drafting, first_block=1)
    request.table = np.arange(1, 65, dtype=np.int32)[None]
    request.step(300, 1, 302)
    computed = 301
    is_left_out = np.random.default_rng(3).random(200) < 0.6
    for is_left in is_left_out:
        clock[0] += 0.1
        request.draft(computed + 1)
        if is_left:  # verified, but the engine asks for no drafts
            lengths = np.array([computed + 5], np.int32)
            step = drafting.begin_verification(
                request.table, lengths, np.array([5], np.int32), np.array([True])
            )
            for scored in step.scored.values() if step is not None else ():
                scored.log_sum_exps[:] = 0.0
            computed += 1  # no draft stood; those of the next step are not of this project
            clock[0] += 0.1
        request.step(computed, 5, computed + 4)
        computed += 3
    rows = read_decision_log(log)[1]
    times = [us for row in rows for us in row["round_us_by_age"]]
    assert times
    assert times == pytest.approx([100_000.0] * len(times))


def _cycles(ages, num_cycles):
    """Rounds from one selection to the next, as this test counted them."""
    cycles, rounds = [], []
    for age in ages:
        rounds.append(age)
        if age == 0:
            cycles.append(rounds)
            rounds = []
    return cycles[:num_cycles]
