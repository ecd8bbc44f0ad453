"""vLLM's engine with a period that it chooses: every decision is in the log."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; pip install 'blockcompact-jax[vllm]'")

import engines

from blockcompact_jax.decision_log import read_decision_log

OPTIONS = {
    "num_gpu_blocks_override": 40,
    "max_num_batched_tokens": 128,
    "max_model_len": 512,
}
PROMPTS = [engines.prompt(n, seed=4) for n in (200, 160)]
NUM_NEW = 90


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return engines.save_llama(tmp_path_factory.mktemp("llama"))


def chosen(log, **rest):
    options = {"budget": "3b", "reselect_every_tokens": "auto", "decision_log": str(log)}
    return {**options, **rest}


def test_CST_2_attend_logs_what_each_selection_lost(model, tmp_path):
    """CST-2: ages, mass, time and the next period of every selection but the first ones."""
    log = tmp_path / "decisions.jsonl"
    with engines.engine(model, compaction=chosen(log, max_mass_lost=0.05), **OPTIONS) as llm:
        engines.generate(llm, PROMPTS, NUM_NEW)
        num_scored = engines.compaction_of(llm).counts.num_scored
    facts, rows = read_decision_log(log)
    assert (facts["engine"], facts["policy"]) == ("vllm", "attend")
    # The first selections end none, and the last scores may have had no step to select for.
    assert num_scored - 2 * len(PROMPTS) <= len(rows) <= num_scored - len(PROMPTS)
    assert rows
    for row in rows:
        assert row["mass_missed"] >= row["mass_missed_at_best"] - 1e-5
        assert 0 <= row["mass_missed"] <= 1
        assert row["select_us"] > 0
        assert row["max_mass_lost"] == 0.05
        assert row["next_period_tokens"] >= 1
    assert len({row["request"] for row in rows}) == len(PROMPTS)


def test_CST_2_lossless_logs_costs_and_gives_stocks_tokens(model, tmp_path):
    """CST-2: every term of a selection's cost, and a period in rounds."""
    log = tmp_path / "decisions.jsonl"
    with engines.engine(model, backend=engines.STOCK, **OPTIONS) as llm:
        expected = engines.generate(llm, PROMPTS, NUM_NEW)
    with engines.engine(
        model,
        compaction=chosen(log, policy="lossless"),
        speculative_config=engines.self_speculation(4),
        **OPTIONS,
    ) as llm:
        assert engines.generate(llm, PROMPTS, NUM_NEW) == expected
        num_scored = engines.compaction_of(llm).counts.num_scored
    facts, rows = read_decision_log(log)
    assert facts["policy"] == "lossless"
    # The first selections end none, and the last scores may have had no step to select for.
    assert num_scored - 2 * len(PROMPTS) <= len(rows) <= num_scored - len(PROMPTS)
    assert rows
    assert rows[-1]["tokens_per_round"] >= 1
    terms = ("plan_us", "table_update_us", "metadata_us", "wait_us", "allocator_us", "kv_move_us")
    assert all(row[term] is not None for row in rows for term in terms)
    assumed = "table_update, metadata, wait, allocator, kv_move, avoided_stall"
    for row in rows:
        assert (row["assumed"], row["select_us"] > 0) == (assumed, True)
        assert row["cost_us"] == row["plan_us"]
        if row["basis"] == "costs":
            assert (row["is_retained"], row["horizon_rounds"]) == (True, row["next_period_rounds"])
        assert (row["benefit_us"] is None) == bool(row["unmeasured"])
    assert all(1 <= row["next_period_rounds"] <= 17 for row in rows)
