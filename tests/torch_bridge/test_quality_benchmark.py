"""The quality benchmark's own arithmetic, on a tiny model; nothing here looks at a result."""

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from torch_bridge.huggingface.attend_cache import AttendCache

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    """Imports a benchmark script by its name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module
    for name in [name for name in sys.modules if name.startswith("quality")]:
        del sys.modules[name]


def test_measures_are_those_of_the_definitions(scripts):
    full = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
    logits = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]))
    found = scripts("quality_rivals").measures(logits, full, [0, 1])
    assert found["kl"] == pytest.approx([0.25 * math.log(2), 0.0], abs=1e-6)
    assert found["is_top1_equal"] == [0, 1]
    assert found["is_token_found"] == [0, 1]


def test_a_filled_cache_is_one_that_was_prefilled(scripts, model):
    generator = torch.Generator().manual_seed(7)
    context, tokens = torch.randint(1, 97, (180,), generator=generator).tolist(), [3, 4, 5, 6, 7]
    options = {"budget": "30%", "block_tokens": 8, "layout": "vec", "reselect_every_tokens": 2}
    with torch.inference_mode():
        prefill = scripts("quality_ours").Prefill(model, context)
        with AttendCache(model, **options) as cache:
            found = prefill.logits(prefill.fill(cache), tokens)
            num_keys = cache.sequences[0].num_keys
        with AttendCache(model, **options) as cache:
            rows = [model(torch.tensor([context]), past_key_values=cache).logits[0, -1:]]
            for token in tokens[:-1]:
                rows.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0])
            assert cache.sequences[0].num_keys == num_keys
    torch.testing.assert_close(found, torch.cat(rows), rtol=1e-5, atol=1e-5)


def test_a_whole_cache_predicts_in_one_forward_what_it_does_token_by_token(scripts, model):
    generator = torch.Generator().manual_seed(7)
    context, tokens = torch.randint(1, 97, (180,), generator=generator).tolist(), [3, 4, 5, 6, 7]
    with torch.inference_mode():
        prefill = scripts("quality_ours").Prefill(model, context)
        one_by_one = prefill.logits(prefill.fill(DynamicCache(config=model.config)), tokens)
        torch.testing.assert_close(prefill.full_logits(tokens), one_by_one, rtol=1e-5, atol=1e-5)


def test_results_hold_every_position_but_scored_ones(scripts, llama):
    ours = scripts("quality_ours")
    job = random_job("text 0")
    with torch.inference_mode():
        results = list(ours.our_results(llama, job, methods=ours.OURS))
    assert len(results) == len(ours.BUDGETS) * len(ours.OURS)
    methods = {method.name: method for method in ours.OURS}
    for result in results:
        method = methods[result["method"]]
        scored = [place for place, value in enumerate(result["kl"]) if value is None]
        every = method.every_tokens
        assert scored == ([] if every is None else list(range(every, 40, every)))
        assert len(result["kl"]) == len(result["is_top1_equal"]) == 40
        kept = result["num_kept_tokens"]
        assert result["budget"] * 640 - method.block_tokens < kept <= result["budget"] * 640


def random_job(name):
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(1, 97, (680,), generator=generator).tolist()
    return sys.modules["quality_texts"].Job(name=name, context=tokens[:640], tokens=tokens[640:])


FOUND = {"num_kept_tokens": 8, "is_top1_equal": [1] * 4, "is_token_found": [1, 1, 0, 1]}


def result_of(job, method, kl):
    return {"job": job, "method": method, "budget": 0.1, "kl": kl, **FOUND}


def test_methods_are_compared_where_all_of_them_have_a_prediction(scripts):
    """The first prediction is the prefill's; where ours attended to everything, none counts."""
    rows_of = scripts("quality_rows").rows_of
    results = [
        result_of("text 0", "ours", [0.0, 1.0, None, 3.0]),
        result_of("text 0", "press", [9.0, 4.0, 8.0, 4.0]),
        result_of("text 1", "ours", [0.0, 8.0, None, 8.0]),
        result_of("text 1", "press", [9.0, 5.0, 8.0, 4.0]),
        result_of("needle", "ours", [0.0, 8.0, 8.0, 8.0]),
        result_of("needle", "press", [0.0, 8.0, 8.0, 8.0]),
    ]
    rows = {row["method"]: row for row in rows_of({"model": "tiny"}, results)}
    assert [rows[name]["kl"] for name in ("ours", "press")] == [5.0, 4.25]
    assert rows["ours"]["kl_geometric"] == pytest.approx(4.0)
    assert rows["ours"]["kl_median"] == 5.5
    assert rows["ours"]["kl_by_text"] == {"text 0": 2.0, "text 1": 8.0}
    assert rows["press"]["kl_by_text"] == {"text 0": 4.0, "text 1": 4.5}
    assert rows["press"]["needle_recall"] == pytest.approx(2 / 3)
    assert (rows["press"]["model"], rows["press"]["top1"]) == ("tiny", 1.0)
    assert rows["press"]["samples"][0]["kl"] == [9.0, 4.0, 8.0, 4.0]


def test_needles_alone_and_equal_predictions_have_rows(scripts):
    rows_of = scripts("quality_rows").rows_of
    (needles,) = rows_of({}, [result_of("needle", "ours", [0.0] * 4)])
    assert (needles["kl"], needles["kl_geometric"], needles["top1"]) == (None, None, None)
    (equal,) = rows_of({}, [result_of("text 0", "ours", [0.0] * 4)])
    assert equal["kl_geometric"] == pytest.approx(scripts("quality_rows").SMALLEST_KL)
    assert equal["needle_recall"] is None


def test_tables_name_every_method_budget_and_text(scripts):
    module = scripts("quality_rows")
    results = [
        result_of("text 0", "ours", [0.0, 1.0, None, 3.0]),
        result_of("text 1", "ours", [0.0, 0.002, None, 0.002]),
        result_of("needle", "ours", [0.0, 8.0, 8.0, 8.0]),
    ]
    results += [{**result, "method": "press", "budget": 0.1} for result in results[:2]]
    results += [{**result, "budget": 0.25} for result in results]
    rows = module.rows_of({}, results)
    assert module.mean_table(rows) == [
        "|  | 10%: kept | KL | geom. | top-1 | needle | 25%: kept | KL | geom. | top-1 | needle |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| ours | 8 | 1.001 | 0.063 | 1.00 | 0.67 | 8 | 1.001 | 0.063 | 1.00 | 0.67 |",
        "| press | 8 | 1.001 | 0.063 | 1.00 | - | 8 | 1.001 | 0.063 | 1.00 | - |",
    ]
    assert module.text_table(rows, 0.25) == [
        "| KL at 25% | 0 | 1 |",
        "| --- | --- | --- |",
        "| ours | 2.000 | 0.0020 |",
        "| press | 2.000 | 0.0020 |",
    ]


def test_a_stopped_run_goes_on_where_it_was(scripts, tmp_path):
    quality = scripts("quality")
    path, about = tmp_path / "results.json", {"machine": "this"}

    def unit(job, method):
        found = {"kl": [0.0, 0.5], "is_top1_equal": [1, 1], "is_token_found": [1, 1]}
        return [
            {"job": job, "method": method, "budget": budget, "num_kept_tokens": 8, **found}
            for budget in quality.BUDGETS
        ]

    store = quality.Store(path, about, {"model": "a"})
    with pytest.raises(ZeroDivisionError):
        store.add(stopped_after([*unit("text 0", "ours"), *unit("text 0", "press")[:2]]))
    again = quality.Store(path, about, {"model": "a"})
    assert again.done == {("text 0", "ours")}  # a half unit is computed anew
    other = quality.Store(path, about, {"model": "b"})
    assert other.done == set()
    other.add(unit("text 0", "ours"))
    rows = json.loads(path.read_text())["results"]
    assert [(row["model"], row["budget"]) for row in rows] == [
        (model, budget) for model in "ab" for budget in quality.BUDGETS
    ]
    with pytest.raises(SystemExit, match="has other machine than this run"):
        quality.Store(path, {"machine": "that"}, {"model": "a"})


def stopped_after(results):
    yield from results
    raise ZeroDivisionError


class Characters:
    """A tokenizer of single characters."""

    def __call__(self, text, **_):
        return {"input_ids": list(text.encode())}


def test_texts_and_needles_are_as_long_as_asked_and_differ(scripts, monkeypatch):
    texts = scripts("quality_texts")
    jobs = texts.text_jobs(Characters(), context_tokens=600, num_tokens=9, num_texts=10)
    assert len({tuple(job.context) for job in jobs}) == len({job.name for job in jobs}) == 10
    assert {(len(job.context), len(job.tokens)) for job in jobs} == {(600, 9)}
    again = texts.text_jobs(Characters(), context_tokens=600, num_tokens=9, num_texts=10)
    assert jobs == again
    needles = texts.needle_jobs(Characters(), lengths=[600, 900])
    assert [len(job.context) for job in needles] == [600] * 3 + [900] * 3
    assert len({tuple(job.tokens) for job in needles}) == 6
    monkeypatch.setattr(texts, "topics", {"name": "a short manual"})
    with pytest.raises(SystemExit, match="'manual' is too short for 609 tokens"):
        texts.text_jobs(Characters(), context_tokens=600, num_tokens=9, num_texts=10)
