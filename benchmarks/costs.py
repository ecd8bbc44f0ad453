"""The choice of when to select anew, predicted and online, against every fixed period.

    for part in calibration 0 1 2; do
        python benchmarks/costs.py --part $part --json benchmarks/results/costs.json
    done

A part takes a minute or so. "calibration" measures rounds and selections on a text of its own and
predicts a time a token for each period; a number is a text, decoded from the same prefilled bytes
with every fixed period and with the online choice, from nothing and from that calibration, in
rotating order. Tokens must be the same in all. Each part adds to the file, which then holds what
all parts so far come to; a text that is run again adds repeats.

The time of a way on a text is the least of its repeats, since other work on the machine only adds
to it; a way's time a token is the mean of these over the texts. The goal: the period that the
calibration predicts (the nearest that was measured) takes at most 1.1 times the time a token of the
best one. On one text of a hundred tokens it is chance which period is best, since a round more or
less is a tenth: take several texts. All samples are stored.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blockcompact_jax.budget import parse_budget
from blockcompact_jax.calibration import read_calibration
from blockcompact_jax.kernels import Layout
from blockcompact_jax.provenance import machine, origin
from blockcompact_jax.reselection import OnlineReselection, Reselection
from torch_bridge.huggingface.cache import CompactedLayer
from torch_bridge.huggingface.calibrate import calibrate, calibration_facts
from torch_bridge.huggingface.options import RunOptions
from torch_bridge.huggingface.policies import score_source
from torch_bridge.huggingface.run import DTYPES
from torch_bridge.huggingface.sampling import Sampler
from torch_bridge.huggingface.session import CompactionSession, SessionLimits
from torch_bridge.huggingface.speculate import decode_speculative, warm_up
from torch_bridge.models.load import LoadedModel, load_model
from torch_bridge.prompts import build_prompt

GOAL = 1.1
CALIBRATION = "calibration"
ONLINE, CALIBRATED = "online", "online, calibrated"
_SETTINGS = ("model", "dtype", "context", "new_tokens", "budget", "periods")


def main() -> None:
    arguments = parse_arguments()
    settings = {name: getattr(arguments, name) for name in _SETTINGS}
    document = read_document(arguments.json, settings)
    options = RunOptions(
        model=arguments.model,
        dtype=arguments.dtype,
        context_tokens=arguments.context,
        num_new_tokens=arguments.new_tokens,
        budget=parse_budget(arguments.budget),
        compare_full=False,
    )
    loaded = load_model(options.model, dtype=DTYPES[options.dtype])
    # Text 0 is what calibrates: no text that is compared has a part in the prediction.
    text = 0 if arguments.part == CALIBRATION else 1 + int(arguments.part)
    tokens = build_prompt(loaded.tokenizer, context_tokens=options.context_tokens * (text + 1))
    context = tokens.token_ids[-options.context_tokens :]
    if arguments.part == CALIBRATION:
        document[CALIBRATION] = calibrated(options, loaded, context, num_rounds=arguments.rounds)
    else:
        costs = arguments.json.with_suffix(".calibration.json")
        costs.write_text(json.dumps(document[CALIBRATION]))
        facts = calibration_facts(options, options.context_tokens)
        online = read_calibration(costs, facts=facts)
        costs.unlink()
        ways = ways_of(arguments.periods, online)
        samples = run_text(options, loaded, context, ways, num_repeats=arguments.repeats)
        for sample in samples:  # each is stored as it comes: a run that is stopped loses one
            document["samples"].append({"text": text - 1, **sample})
            store(arguments.json, document)
    document |= results_of(document, arguments.periods)
    store(arguments.json, document)
    print_results(document)


def store(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="file to add results to")
    parser.add_argument("--part", required=True, help='"calibration", or the number of a text')
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--budget", default="10%")
    parser.add_argument("--periods", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=64, help="rounds of the calibration")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def read_document(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What earlier parts stored; refused where they ran with other settings."""
    fresh = {"settings": dict(settings), **origin(), "samples": []}
    if not path.exists():
        return fresh
    found: dict[str, Any] = json.loads(path.read_text())
    for name in ("settings", "machine", "versions"):
        if found[name] != fresh[name]:
            raise SystemExit(f"{path} holds parts with other {name}; give another `--json`")
    return found


def calibrated(
    options: RunOptions, loaded: LoadedModel, context: list[int], *, num_rounds: int
) -> dict[str, Any]:
    """As `blockcompact calibrate` stores it."""
    found = calibrate(
        options, loaded, context, num_samples=4, horizon_steps=32, num_rounds=num_rounds
    )
    facts = calibration_facts(options, len(context))
    return {**facts, **found.to_dict(), "machine": machine()}


def ways_of(periods: list[int], calibrated: OnlineReselection) -> dict[str, dict[str, Any]]:
    """Arguments of `Reselection` of each way."""
    fixed = {way_of(period): {"period_rounds": period} for period in periods}
    online = OnlineReselection()
    return {
        **fixed,
        ONLINE: {"period_rounds": 4, "online": online},
        CALIBRATED: {"period_rounds": 4, "online": calibrated},
    }


def way_of(period: int) -> str:
    return f"every {period} rounds"


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A prefilled context, to begin from again and again.

    Attributes:
        context: its tokens.
        first_token: the token after it.
        packed: bytes of the packed store.
        newest: bytes of the newest tokens.
        mass: scores of the blocks.
    """

    context: list[int]
    first_token: int
    packed: torch.Tensor
    newest: torch.Tensor
    mass: torch.Tensor


def run_text(
    options: RunOptions,
    loaded: LoadedModel,
    context: list[int],
    ways: Mapping[str, dict[str, Any]],
    *,
    num_repeats: int,
) -> Iterator[dict[str, Any]]:
    """Every way in turns; each repeat begins at another way."""
    sampler = Sampler(temperature=0.0, seed=0)
    prefix = prefill(options, loaded, context, sampler)
    names, tokens = list(ways), None
    # The first way of all would pay for cold memory and threads: it runs once before.
    run_way(options, loaded, prefix, ways[names[0]], sampler)
    for repeat in range(num_repeats):
        turn = repeat * len(names) // num_repeats
        for name in [*names[turn:], *names[:turn]]:
            sample = run_way(options, loaded, prefix, ways[name], sampler)
            given = sample.pop("tokens")
            tokens = tokens or given
            if given != tokens:
                raise SystemExit(f"{name} gave other tokens; nothing of it is stored")
            print(f"{name:20} {sample['ms_per_token']:8.1f} ms/token", flush=True)
            yield {"way": name, "repeat": repeat, **sample}


def new_session(
    options: RunOptions, loaded: LoadedModel, chosen: Mapping[str, Any]
) -> CompactionSession:
    """One of equal sizes for every way, whose longest periods differ."""
    session = CompactionSession(
        model=loaded.model,
        limits=SessionLimits(
            max_tokens=options.context_tokens + options.num_new_tokens + options.num_draft_tokens,
            num_draft_tokens=options.num_draft_tokens,
            num_lookup_tokens=options.num_lookup_tokens,
            reselect_every_rounds=options.reselect_every_rounds,
            block_tokens=options.block_tokens,
            budget=options.budget,
        ),
        score_source=score_source(options.policy, seed=options.seed),
        layout=Layout[options.layout.upper()],
        attention=options.attention,
        online=chosen.get("online", OnlineReselection()),
    )
    if "online" not in chosen:
        session.reselection = Reselection(**chosen, is_recorded=True)
    return session


def prefill(
    options: RunOptions, loaded: LoadedModel, context: list[int], sampler: Sampler
) -> Prefix:
    with new_session(options, loaded, {"period_rounds": options.reselect_every_rounds}) as session:
        session.warm_up()
        logits = session.prefill(context)
        warm_up(sampler, options.num_draft_tokens, logits.shape[-1])
        if not all(isinstance(layer, CompactedLayer) for layer in session.cache.layers):
            raise SystemExit("`--model` has layers that are not full attention; give another")
        return Prefix(
            context=context,
            first_token=sampler.choose(logits),
            packed=session.full.packed.clone(),
            newest=session.full.newest.clone(),
            mass=session.blocks.mass.clone(),
        )


def run_way(
    options: RunOptions,
    loaded: LoadedModel,
    prefix: Prefix,
    chosen: Mapping[str, Any],
    sampler: Sampler,
) -> dict[str, Any]:
    """One decoding from the prefilled bytes, the first selection not timed."""
    num_tokens = len(prefix.context)
    with new_session(options, loaded, chosen) as session:
        session.full.packed.copy_(prefix.packed)
        session.full.newest.copy_(prefix.newest)
        session.full.mark_packed(num_tokens)
        session.blocks.mass.copy_(prefix.mass)
        for layer in session.cache.layers:
            layer.length, layer.is_all_handed_out = num_tokens, False
        session.num_tokens = num_tokens
        session.reselect()
        begin = time.perf_counter()
        done = decode_speculative(
            session,
            prefix.context,
            first_token=prefix.first_token,
            num_tokens=options.num_new_tokens,
            sampler=sampler,
            eos_token_ids=frozenset(),
            on_tokens=lambda _: None,
        )
        seconds = time.perf_counter() - begin
        return {
            "tokens": done.tokens,
            "ms_per_token": 1e3 * seconds / (len(done.tokens) - 1),
            "acceptance_rate": done.acceptance_rate,
            "num_rounds": done.num_rounds,
            "num_selections": session.runtime.num_selections - 1,
            "decisions": {
                basis.value: number
                for basis, number in session.reselection.num_rounds_by_basis.items()
            },
        }


def results_of(document: Mapping[str, Any], periods: list[int]) -> dict[str, Any]:
    """What all parts so far come to."""
    samples: list[dict[str, Any]] = whole_texts(document["samples"], len(periods) + 2)
    prediction = (document.get(CALIBRATION) or {}).get("prediction")
    predicted = {
        period: prediction["us_per_token"][period - 1] / 1e3
        for period in periods
        if prediction and period <= len(prediction["us_per_token"])
    }
    chosen = prediction["period_rounds"] if prediction else None
    rows = [way_row(way, samples) for way in dict.fromkeys(each["way"] for each in samples)]
    return {
        "predictions": [
            {"period_rounds": period, "predicted_ms_per_token": ms}
            for period, ms in predicted.items()
        ],
        "results": rows,
        "comparison": comparison({row["way"]: row for row in rows}, chosen, periods),
    }


def whole_texts(samples: list[dict[str, Any]], num_ways: int) -> list[dict[str, Any]]:
    """Samples of the texts that every way has decoded."""
    ways: dict[int, set[str]] = {}
    for each in samples:
        ways.setdefault(each["text"], set()).add(each["way"])
    return [each for each in samples if len(ways[each["text"]]) == num_ways]


def way_row(way: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    mine = [each for each in samples if each["way"] == way]
    texts = sorted({each["text"] for each in mine})
    least = [min(each["ms_per_token"] for each in mine if each["text"] == text) for text in texts]
    return {
        "way": way,
        "ms_per_token": statistics.fmean(least),
        "acceptance_rate": statistics.fmean(each["acceptance_rate"] for each in mine),
        "num_rounds": statistics.fmean(each["num_rounds"] for each in mine),
        "num_selections": statistics.fmean(each["num_selections"] for each in mine),
        "ms_per_token_by_text": dict(zip(texts, least, strict=True)),
    }


def comparison(
    rows: Mapping[str, dict[str, Any]], predicted: int | None, periods: list[int]
) -> dict[str, Any]:
    """Ratios to the best fixed period, all texts together."""
    if not rows:
        return {}
    fixed = {period: rows[way_of(period)]["ms_per_token"] for period in periods}
    best = min(fixed, key=fixed.__getitem__)
    nearest = min(periods, key=lambda each: abs(math.log(each / (predicted or 1))))
    over_best = None if predicted is None else fixed[nearest] / fixed[best]
    return {
        "num_texts": len(rows[way_of(best)]["ms_per_token_by_text"]),
        "best_fixed_period_rounds": best,
        "predicted_period_rounds": predicted,
        "predicted_over_best": over_best,
        "is_goal_met": over_best is not None and over_best <= GOAL,
        "worst_fixed_over_best": max(fixed.values()) / fixed[best],
        "online_over_best": rows[ONLINE]["ms_per_token"] / fixed[best],
        "calibrated_over_best": rows[CALIBRATED]["ms_per_token"] / fixed[best],
    }


def print_results(document: Mapping[str, Any]) -> None:
    for row in document["predictions"]:
        period, ms = row["period_rounds"], row["predicted_ms_per_token"]
        print(f"predicted {way_of(period):20} {ms:8.1f} ms/token")
    for row in document["results"]:
        print(
            f"{row['way']:20} {row['ms_per_token']:8.1f} ms/token, acceptance "
            f"{row['acceptance_rate']:.1%}, {row['num_selections']:.1f} selections"
        )
    for name, value in document["comparison"].items():
        print(f"{name:28} {value if not isinstance(value, float) else round(value, 3)}")


if __name__ == "__main__":
    main()
