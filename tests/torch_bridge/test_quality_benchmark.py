"""The quality benchmark's own arithmetic, on a tiny model; nothing here looks at a result."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from torch_bridge.huggingface.attend_cache import AttendCache

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("quality_benchmark", SCRIPTS / "quality.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_measures_are_those_of_the_definitions(quality):
    full = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
    logits = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]))
    found = quality.measures(logits, full, [0, 1])
    assert found["kl"] == pytest.approx([0.25 * math.log(2), 0.0], abs=1e-6)
    assert found["is_top1_equal"] == [False, True]
    assert found["is_token_found"] == [False, True]


def test_a_filled_cache_is_one_that_was_prefilled(quality, model):
    generator = torch.Generator().manual_seed(7)
    context, tokens = torch.randint(1, 97, (180,), generator=generator).tolist(), [3, 4, 5, 6, 7]
    options = {"budget": "30%", "block_tokens": 8, "layout": "vec", "reselect_every_tokens": 2}
    with torch.inference_mode():
        prefill = quality.Prefill(model, context)
        with AttendCache(model, **options) as cache:
            found = prefill.logits(prefill.fill(cache), tokens)
            num_keys = cache.sequences[0].num_keys
        with AttendCache(model, **options) as cache:
            rows = [model(torch.tensor([context]), past_key_values=cache).logits[0, -1:]]
            for token in tokens[:-1]:
                rows.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0])
            assert cache.sequences[0].num_keys == num_keys
    torch.testing.assert_close(found, torch.cat(rows), rtol=1e-5, atol=1e-5)


def test_a_whole_cache_predicts_in_one_forward_what_it_does_token_by_token(quality, model):
    generator = torch.Generator().manual_seed(7)
    context, tokens = torch.randint(1, 97, (180,), generator=generator).tolist(), [3, 4, 5, 6, 7]
    with torch.inference_mode():
        prefill = quality.Prefill(model, context)
        one_by_one = prefill.logits(prefill.fill(DynamicCache(config=model.config)), tokens)
        torch.testing.assert_close(prefill.full_logits(tokens), one_by_one, rtol=1e-5, atol=1e-5)


def test_results_hold_every_position_but_scored_ones(quality, llama):
    generator = torch.Generator().manual_seed(6)
    context = torch.randint(1, 97, (640,), generator=generator).tolist()
    tokens = torch.randint(1, 97, (40,), generator=generator).tolist()
    jobs = [quality.Job(name="text 0", context=context, tokens=tokens)]
    with torch.inference_mode():
        results = quality.our_results(llama, jobs)
    assert len(results) == len(quality.BUDGETS) * len(quality.OURS)
    methods = {method.name: method for method in quality.OURS}
    for result in results:
        method = methods[result["method"]]
        scored = [place for place, value in enumerate(result["kl"]) if value is None]
        assert scored == list(range(method.every_tokens, 40, method.every_tokens))
        assert len(result["kl"]) == len(result["is_top1_equal"]) == 40
        num_blocks = math.floor(result["budget"] * 640 / method.block_tokens)
        once = method.every_tokens == quality.NEVER
        kept = result["num_kept_tokens"]  # 640 tokens have no partial block
        assert kept == num_blocks * method.block_tokens if once else kept <= result["budget"] * 640
    rows = quality.rows_of("tiny", results)
    assert sum(len(row["samples"]) for row in rows) == len(results)
    (row, *_) = rows
    assert (row["model"], row["samples"][0]["job"]) == ("tiny", "text 0")
    assert row["needle_recall"] is None
    assert row["kl"] >= 0


def test_methods_are_compared_where_all_of_them_have_a_prediction(quality):
    """The first prediction is the prefill's; where ours attended to everything, none counts."""
    found = {"num_kept_tokens": 8, "is_top1_equal": [True] * 4, "is_token_found": [True] * 4}
    ours = {"job": "text 0", "method": "ours", "budget": 0.1, "kl": [0.0, 1.0, None, 2.0], **found}
    press = {"job": "text 0", "method": "press", "budget": 0.1, "kl": [9.0, 4.0, 8.0, 3.0], **found}
    rows = {row["method"]: row for row in quality.rows_of("tiny", [ours, press])}
    assert {name: row["kl"] for name, row in rows.items()} == {"ours": 1.5, "press": 3.5}
    assert rows["press"]["samples"][0]["kl"] == [9.0, 4.0, 8.0, 3.0]
