"""What the costs benchmark makes of its samples; nothing is timed here."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "costs.py"
PERIODS = [1, 2]


@pytest.fixture(scope="module")
def costs():
    if not SCRIPT.exists():
        pytest.skip("not a source checkout")
    spec = importlib.util.spec_from_file_location("costs_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def sample(text, way, ms):
    counts = {"acceptance_rate": 0.5, "num_rounds": 4, "num_selections": 2}
    return {"text": text, "way": way, "ms_per_token": ms, **counts}


def samples_of(text, times):
    ways = ["every 1 rounds", "every 2 rounds", "online", "online, calibrated"]
    return [sample(text, way, ms) for way, ms in zip(ways, times, strict=True)]


def document(samples, predicted_us):
    prediction = {"period_rounds": 1, "us_per_token": predicted_us}
    return {"samples": samples, "calibration": {"prediction": prediction}}


def test_the_least_of_a_texts_repeats_counts_and_texts_count_alike(costs):
    samples = [*samples_of(0, [10, 12, 30, 11]), *samples_of(0, [99, 11, 13, 99])]
    samples += samples_of(1, [20, 17, 18, 19])
    samples += samples_of(2, [1, 1, 1, 1])[:3]  # one way of it was not run
    found = costs.results_of(document(samples, [9_000.0, 10_000.0]), PERIODS)
    times = {row["way"]: row["ms_per_token"] for row in found["results"]}
    assert times == {
        "every 1 rounds": 15,
        "every 2 rounds": 14,
        "online": 15.5,
        "online, calibrated": 15,
    }
    compared = found["comparison"]
    assert compared["num_texts"] == 2
    assert (compared["best_fixed_period_rounds"], compared["predicted_period_rounds"]) == (2, 1)
    assert compared["predicted_over_best"] == pytest.approx(15 / 14)
    assert compared["is_goal_met"] is True
    assert compared["online_over_best"] == pytest.approx(15.5 / 14)


@pytest.mark.parametrize(("slower", "is_met"), [(109, True), (111, False)])
def test_the_goal_is_a_tenth_of_the_best_periods_time(costs, slower, is_met):
    samples = samples_of(0, [slower, 100, 100, 100])
    found = costs.results_of(document(samples, [2.0, 1.0]), PERIODS)
    assert found["comparison"]["is_goal_met"] is is_met


def test_without_a_prediction_no_goal_is_met(costs):
    found = costs.results_of({"samples": samples_of(0, [1, 1, 1, 1])}, PERIODS)
    assert found["predictions"] == []
    assert found["comparison"]["predicted_over_best"] is None
    assert found["comparison"]["is_goal_met"] is False


def test_parts_of_other_settings_are_not_mixed(costs, tmp_path):
    path = tmp_path / "costs.json"
    costs.store(path, costs.read_document(path, {"context": 2048}))
    assert costs.read_document(path, {"context": 2048})["samples"] == []
    with pytest.raises(SystemExit, match="parts with other settings"):
        costs.read_document(path, {"context": 4096})
