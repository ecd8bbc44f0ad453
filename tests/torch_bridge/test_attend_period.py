"""When an `AttendCache` selects anew: what its log says, against the policy written out."""

import math
from collections import defaultdict

import pytest
import torch
from attend_twin import AttendTwin
from generating import generate, prompts

from blockcompact_jax.budget import OptionError
from blockcompact_jax.decision_log import read_decision_log
from torch_bridge.huggingface.attend_cache import AttendCache

OPTIONS = {"layout": "vec", "block_tokens": 8}


class AccountingTwin(AttendTwin):
    """Also takes down what each selection that ends missed, and the new one misses."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.ended = defaultdict(list)  # (row, tokens) -> (age, missed, missed at best) of layers

    def _choose(self, layer, row, weights):
        held = self.chosen.get((layer, row))
        super()._choose(layer, row, weights)
        new = self.chosen.get((layer, row))
        if held is None or new is None or held is new:
            return
        scored = weights[:, -1].mean(0)
        age = new[2] - held[2]
        selected, num_candidates, _ = held
        mass = [
            float(scored[block * self.size : (block + 1) * self.size].sum())
            for block in range(num_candidates)
        ]
        missed = sum(share for block, share in enumerate(mass) if block not in selected)
        at_best = sum(sorted(mass)[: num_candidates - len(selected)])
        self.ended[row, new[2]].append((age, missed, at_best))


def test_CST_2_every_decision_says_what_the_ended_selection_missed(llama, tmp_path):
    """CST-2: mass missed by the held blocks and by the best ones, from dense attention."""
    inputs = prompts([190, 150])
    twin = AccountingTwin(fraction=0.4, every_tokens=7, block_tokens=8, padding=[0, 40])
    twin.register("accounting_twin")
    llama.set_attn_implementation("accounting_twin")
    try:
        generate(llama, inputs)
    finally:
        llama.set_attn_implementation("sdpa")
    log = tmp_path / "decisions.jsonl"
    every = {"reselect_every_tokens": 7, "decision_log": log}
    with AttendCache(llama, budget="40%", **every, **OPTIONS) as cache:
        generate(llama, inputs, cache)
    facts, rows = read_decision_log(log)
    assert (facts["engine"], facts["policy"], facts["budget"]) == ("transformers", "attend", "40%")
    found = {(row["sequence"], row["num_tokens"]): row for row in rows}
    assert set(found) == set(twin.ended)
    assert len(found) == 6
    for key, layers in twin.ended.items():
        row = found[key]
        age, missed, at_best = (sum(part) / len(layers) for part in zip(*layers, strict=True))
        assert row["age_tokens"] == age == 7
        assert row["mass_missed"] == pytest.approx(missed, abs=1e-4)
        assert row["mass_missed_at_best"] == pytest.approx(at_best, abs=1e-4)
        assert row["mass_beyond_best"] == pytest.approx(missed - at_best, abs=2e-4)
        assert row["mass_lost"] is None, "no fresh selection was measured"
        assert row["select_us"] > 0
        assert (row["basis"], row["max_mass_lost"]) == ("fixed period", None)
        assert row["next_period_tokens"] == 7


@pytest.mark.parametrize("bound", [1e-6, 0.9])
def test_a_selection_is_held_as_long_as_was_decided_before(llama, tmp_path, bound):
    log = tmp_path / "decisions.jsonl"
    chosen = {"reselect_every_tokens": "auto", "max_mass_lost": bound, "decision_log": log}
    with AttendCache(llama, budget="40%", **chosen, **OPTIONS) as cache:
        generate(llama, prompts([190]), cache, max_new_tokens=60)
        num_scored = cache.sequences[0].num_scored
    rows = read_decision_log(log)[1]
    assert len(rows) == num_scored - 1, "the first selection ends none"
    ages = [row["age_tokens"] for row in rows]
    assert ages == [1, *(row["next_period_tokens"] for row in rows[:-1])]
    assert {row["max_mass_lost"] for row in rows} == {bound}
    for row in rows:
        newest = rows[max(row["number"] - 31, 0) : row["number"] + 1]
        fresh = [each["mass_beyond_best"] for each in newest if each["age_tokens"] == 1]
        lost = row["mass_beyond_best"] - sum(fresh) / len(fresh)
        assert row["mass_lost"] == pytest.approx(lost, abs=1e-12)
    if bound == 0.9:
        assert ages == [1, 4, 8, 16], "nothing exceeds the loose bound"


def test_without_a_log_nothing_is_written_and_auto_needs_none(llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with AttendCache(llama, budget="40%", reselect_every_tokens="auto", **OPTIONS) as cache:
        generate(llama, prompts([190]), cache)
        assert cache.sequences[0].period.choice.period >= 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reselect_every_tokens": "often"}, r"`reselect_every_tokens` is 'often'"),
        ({"reselect_every_tokens": 0}, r"`reselect_every_tokens` is 0"),
        ({"max_mass_lost": 0.1}, r"`max_mass_lost` is given with `reselect_every_tokens` 4"),
        ({"reselect_every_tokens": "auto", "max_mass_lost": math.nan}, r"`max_mass_lost` is nan"),
        (
            {"select_by": "estimate", "max_mass_lost": 0.01},
            r"`max_mass_lost` is '0.01', but `select_by` 'estimate' selects for every token",
        ),
    ],
)
def test_a_period_that_cannot_be_used_is_refused(llama, options, message):
    with pytest.raises(OptionError, match=message):
        AttendCache(llama, budget="40%", **options)
    assert llama.config._attn_implementation == "sdpa"


def test_a_decision_costs_no_token(llama, tmp_path):
    """The log of a fixed period changes nothing that is generated."""
    inputs, options = prompts([190]), {"reselect_every_tokens": 5, **OPTIONS}
    with AttendCache(llama, budget="40%", **options) as cache:
        expected = generate(llama, inputs, cache)
    log = tmp_path / "decisions.jsonl"
    with AttendCache(llama, budget="40%", decision_log=log, **options) as cache:
        assert torch.equal(generate(llama, inputs, cache), expected)
