"""The online choice of when to select anew, against every fixed period, on a real model.

    python benchmarks/costs.py --json benchmarks/results/costs.json

One process runs every fixed period and the online choice, in turns, from the same prompt; the
online choice starts once from nothing and once from a calibration made first, which also predicts
a time a token for each period. Tokens must be the same in all. Times waver with the machine's
other work: only ratios within one run of this script mean anything, and all samples are stored.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockcompact_jax.budget import parse_budget
from blockcompact_jax.provenance import machine, origin
from torch_bridge.huggingface.calibrate import Calibration, calibrate, calibration_facts
from torch_bridge.huggingface.options import RunOptions
from torch_bridge.huggingface.run import DTYPES, run_decoding
from torch_bridge.models.load import LoadedModel, load_model
from torch_bridge.prompts import build_prompt


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="file to write results to")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--budget", default="10%")
    parser.add_argument("--periods", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=32, help="rounds of the calibration")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    options = RunOptions(
        model=arguments.model,
        dtype=arguments.dtype,
        context_tokens=arguments.context,
        num_new_tokens=arguments.new_tokens,
        budget=parse_budget(arguments.budget),
        compare_full=False,
        has_course=True,
    )
    loaded = load_model(options.model, dtype=DTYPES[options.dtype])
    context = build_prompt(loaded.tokenizer, context_tokens=options.context_tokens).token_ids
    found = calibrate(
        options, loaded, context, num_samples=4, horizon_steps=32, num_rounds=arguments.rounds
    )
    with tempfile.TemporaryDirectory() as folder:
        costs = Path(folder) / "calibration.json"
        facts = calibration_facts(options, len(context))
        costs.write_text(json.dumps({**facts, **found.to_dict(), "machine": machine()}))
        ways = ways_of(options, arguments.periods, costs)
        samples = run_all(ways, loaded, num_repeats=arguments.repeats)
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    document = {"settings": settings, **origin(), **results_of(samples, found, arguments.periods)}
    arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print_results(document)


def ways_of(options: RunOptions, periods: list[int], costs: Path) -> dict[str, RunOptions]:
    online = replace(options, is_reselecting_online=True)
    return {
        **{
            f"every {period} rounds": replace(options, reselect_every_rounds=period)
            for period in periods
        },
        "online": online,
        "online, calibrated": replace(online, costs_file=costs),
    }


def run_all(
    ways: dict[str, RunOptions], loaded: LoadedModel, *, num_repeats: int
) -> dict[str, list[dict[str, Any]]]:
    """Every way in turns, `num_repeats` times. What compiles does so before a run's own time."""
    samples: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    tokens = None
    for _ in range(num_repeats):
        for way, chosen in ways.items():
            report = run_decoding(chosen, loaded=loaded).to_dict()
            tokens = tokens or report["token_ids"]
            if report["token_ids"] != tokens:
                raise SystemExit(f"{way} gave other tokens; nothing of it is stored")
            samples[way].append(report)
    return samples


def results_of(
    samples: dict[str, list[dict[str, Any]]], found: Calibration, periods: list[int]
) -> dict[str, Any]:
    rows = []
    for way, reports in samples.items():
        times = [1e3 / report["tokens_per_second"] for report in reports]
        rows.append(
            {
                "way": way,
                "median_ms_per_token": statistics.median(times),
                "acceptance_rate": statistics.fmean(each["acceptance_rate"] for each in reports),
                "num_rounds": statistics.fmean(each["num_rounds"] for each in reports),
                "num_selections": statistics.fmean(each["num_selections"] for each in reports),
                "ms_per_token": times,
                "decisions": [each["reselection"]["num_rounds"] for each in reports],
            }
        )
    median = {row["way"]: row["median_ms_per_token"] for row in rows}
    fixed = {period: median[f"every {period} rounds"] for period in periods}
    best = min(fixed, key=fixed.__getitem__)
    predicted = found.prediction
    return {
        "results": rows,
        "predictions": [
            {"period_rounds": period, "predicted_ms_per_token": us / 1e3}
            for period, us in enumerate(predicted.us_per_token if predicted else (), start=1)
        ],
        "comparison": {
            "best_fixed_period_rounds": best,
            "predicted_period_rounds": predicted.period_rounds if predicted else None,
            "nearest_fixed_over_best": _nearest_over_best(
                fixed, predicted and predicted.period_rounds
            ),
            "worst_fixed_over_best": max(fixed.values()) / fixed[best],
            "online_over_best": median["online"] / fixed[best],
            "calibrated_over_best": median["online, calibrated"] / fixed[best],
        },
    }


def _nearest_over_best(fixed: dict[int, float], period: int | None) -> float | None:
    """Time a token of the fixed period nearest to the predicted one, over that of the best."""
    if period is None:
        return None
    nearest = min(fixed, key=lambda each: abs(each - period))
    return fixed[nearest] / min(fixed.values())


def print_results(document: dict[str, Any]) -> None:
    for row in document["results"]:
        print(
            f"{row['way']:20} {row['median_ms_per_token']:8.1f} ms/token, acceptance "
            f"{row['acceptance_rate']:.1%}, {row['num_selections']:.1f} selections"
        )
    for name, value in document["comparison"].items():
        print(f"{name:28} {value if not isinstance(value, float) else round(value, 3)}")


if __name__ == "__main__":
    main()
