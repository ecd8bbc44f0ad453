"""Decoding in vLLM: stock attention against a policy, interleaved in one engine.

    python benchmarks/engines.py --json benchmarks/results/engines.json
    python benchmarks/engines.py --lossless --sequences 8 --context 7800 --json lossless.json

One engine holds the prefilled requests; the policy of its attention backend changes between phases,
so that all policies decode the same requests on the same machine within seconds of one another.
Without a policy the backend is vLLM's own. A phase is a period of re-selection, in which every
request is scored and selects once (by estimates: four times), after two steps that are thrown away:
after another policy's phase all requests are scored in the first and select in the second. Each
round begins with another policy. All samples are stored.

`bound` is what no selection can be faster than: vLLM's own kernel on a tenth of each request's keys
(the oldest, the same in all layers), with nothing scored, selected or looked up.

`--lossless` measures self-speculation instead, in an engine of its own: a phase without drafts is
stock vLLM there, and steps give several tokens, so that tokens a second are compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from stored import store

from torch_bridge.vllm.compaction import AttendCounts, StepCompaction
from torch_bridge.vllm.config import CONFIG_KEY, parse_config
from torch_bridge.vllm.engine_checks import PROPOSER
from torch_bridge.vllm.kv_blocks import LAYOUTS, KVBlocks
from torch_bridge.vllm.periods import scoring_period
from torch_bridge.vllm.steps import StepTables

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's steps are timed from here
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

ATTEND, ESTIMATE = "attend", "attend, by estimates"
POLICIES: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "identity": {"budget": "100%", "reselect_every_tokens": 16},
    ATTEND: {"budget": "10%", "reselect_every_tokens": 16},
    ESTIMATE: {"budget": "10%", "select_by": "estimate", "reselect_every_tokens": 4},
}
BOUND, BOUND_SHARE = "bound", 10  # a tenth, as the budget
NUM_WARM_UP_STEPS = 2  # the first scores all requests, the second selects for all
MODEL = "smollm2-135m"
PHASE_STEPS = 16  # a multiple of all periods
LOSSLESS_BUDGET, NUM_DRAFT_TOKENS, LOSSLESS_EVERY_TOKENS = "10%", 8, 48
LOSSLESS_PHASE_S = 4.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="file to write results to")
    parser.add_argument("--context", type=int, default=8000, help="tokens of each prompt")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=2, help="phases of each policy")
    parser.add_argument("--quick", action="store_true", help="2 x 2,000 tokens, 1 round")
    parser.add_argument("--compile", action="store_true", help="compile the model, as vLLM does")
    parser.add_argument("--lossless", action="store_true", help="measure self-speculation")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.context, arguments.sequences, arguments.rounds = 2000, [1, 2], 1
    kind = LosslessEngine if arguments.lossless else Engine
    engine = kind(max(arguments.sequences), is_compiled=arguments.compile)
    results = []
    for num_sequences in arguments.sequences:
        row = engine.measure(num_sequences, arguments.context, arguments.rounds)
        print({key: value for key, value in row.items() if key != "samples_ms"}, flush=True)
        results.append(row)
    store(
        arguments.json,
        results,
        model=MODEL,
        dtype="bfloat16",
        is_compiled=arguments.compile,
        block_tokens=32,
        **engine.facts,
    )


class Engine:
    """One vLLM engine whose attention policy can be changed between steps.

    Attributes:
        facts: of its policies, for the results.
    """

    facts: ClassVar[dict[str, Any]] = {
        "policies": POLICIES,
    }

    def __init__(self, max_sequences: int, *, is_compiled: bool) -> None:
        self.start(max_sequences, asked(budget="100%"), enforce_eager=not is_compiled)
        self.compactions = {
            name: facts and self.builder.make_compaction(parse_config(asked(**facts)))
            for name, facts in POLICIES.items()
        } | {BOUND: TenthOfKeys(self.builder.layer_names, self.builder.block_size)}

    def start(self, max_sequences: int, additional_config: dict[str, Any], **options: Any) -> None:
        """Loads the model."""
        from vllm import LLM

        from torch_bridge.models.cache import model_directory

        self.llm = LLM(
            model=str(model_directory(MODEL)),
            dtype="bfloat16",
            max_model_len=8192,
            max_num_batched_tokens=8192,
            max_num_seqs=max_sequences,
            block_size=32,
            enable_prefix_caching=False,
            additional_config=additional_config,
            **options,
        )
        self.core = self.llm.llm_engine
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.builder = self.runner.attn_groups[0][0].metadata_builders[0]

    def measure(self, num_sequences: int, context: int, num_rounds: int) -> dict[str, Any]:
        """Step times of every policy, in milliseconds."""
        names = self.prefill(num_sequences, context)
        order = list(self.compactions)
        phases: dict[str, list[Phase]] = {name: [] for name in order}
        for number in range(num_rounds):
            first = number % len(order)
            for name in order[first:] + order[:first]:
                phases[name].append(self.phase_of(self.compactions[name]))
        if len(self.running()) != num_sequences:
            sys.exit("a request ended or was preempted while it was measured; lower --rounds")
        self.core.abort_request(names)
        samples = {name: [phase.steps_ms for phase in done] for name, done in phases.items()}
        flat = {name: [t for steps in done for t in steps] for name, done in samples.items()}
        mean = {name: statistics.fmean(steps) for name, steps in flat.items()}
        median = {name: statistics.median(steps) for name, steps in flat.items()}
        return {
            "sequences": num_sequences,
            "context": context,
            "mean_step_ms": {name: round(value, 2) for name, value in mean.items()},
            "median_step_ms": {name: round(value, 2) for name, value in median.items()},
            "median_step_ms_by_requests_scored": {
                name: by_num_scored(phases[name]) for name in (ATTEND, ESTIMATE)
            },
            "tokens_per_s": {n: round(1e3 * num_sequences / v, 1) for n, v in mean.items()},
            "step_time_of_stock": {n: round(v / mean["stock"], 3) for n, v in mean.items()},
            "attended_share_of_keys": {
                name: round(done[-1].attended_share, 4) for name, done in phases.items()
            },
            "requests_scored": {
                name: [phase.num_scored for phase in phases[name]] for name in (ATTEND, ESTIMATE)
            },
            "samples_ms": samples,
        }

    def phase_of(self, compaction: Any) -> Phase:
        """One period of re-selection under a policy."""
        self.builder.compaction = compaction
        for _ in range(NUM_WARM_UP_STEPS):
            self.step()
        counts = AttendCounts() if compaction is None else compaction.counts
        before, steps, num_scored = replace(counts), [], []
        for _ in range(PHASE_STEPS):
            scored_before = counts.num_scored
            steps.append(self.step())
            num_scored.append(counts.num_scored - scored_before)
        num_full_keys = counts.num_full_keys - before.num_full_keys
        num_keys = counts.num_keys - before.num_keys
        return Phase(steps, num_scored, num_keys / num_full_keys if num_full_keys else 1.0)

    def prefill(self, num_sequences: int, context: int) -> list[str]:
        """Admits requests of different texts and runs until all decode."""
        from vllm import SamplingParams

        from torch_bridge.prompts import build_prompt

        ids = build_prompt(self.llm.get_tokenizer(), context_tokens=context).token_ids
        names = [f"{num_sequences}-{place}" for place in range(num_sequences)]
        params = SamplingParams(temperature=0, max_tokens=8192, ignore_eos=True)
        self.builder.compaction = None
        for place, name in enumerate(names):
            rotated = [ids[0], *ids[1 + place :], *ids[1 : 1 + place]]
            self.core.add_request(name, {"prompt_token_ids": rotated}, params)
        begun = time.perf_counter()
        while len(self.running()) < num_sequences or self.is_prefilling():
            self.step()
        print(f"prefilled {names} in {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        return names

    def running(self) -> list[Any]:
        """Requests that have blocks."""
        return self.core.engine_core.engine_core.scheduler.running

    def is_prefilling(self) -> bool:
        """Whether a request has no token of its own yet."""
        return any(request.num_output_tokens == 0 for request in self.running())

    def step(self) -> float:
        """Milliseconds of one engine step."""
        begun = time.perf_counter()
        self.core.step()
        return (time.perf_counter() - begun) * 1e3


@dataclass(frozen=True)
class Phase:
    """One phase of a policy.

    Attributes:
        steps_ms: of each step.
        num_scored: requests scored in each step.
        attended_share: keys attended to, of all keys.
    """

    steps_ms: list[float]
    num_scored: list[int]
    attended_share: float


def by_num_scored(phases: Iterable[Phase]) -> dict[str, float]:
    """Median step times, by the number of requests that were scored in the step."""
    times: dict[str, list[float]] = {}
    for phase in phases:
        for number, step_ms in zip(phase.num_scored, phase.steps_ms, strict=True):
            times.setdefault(str(number), []).append(step_ms)
    return {number: round(statistics.median(times[number]), 2) for number in sorted(times)}


class TenthOfKeys:
    """In the place of a policy: every row attends to the oldest tenth of its keys.

    Attributes:
        counts: keys attended to so far.
    """

    def __init__(self, layer_names: list[str], block_tokens: int) -> None:
        self.layer_names, self.block_tokens = layer_names, block_tokens
        self.counts = AttendCounts()
        # Nothing is scored.
        self.blocks = KVBlocks(layout=LAYOUTS["vec"], num_layer_rows=0)
        self.period = scoring_period(parse_config(asked(budget="100%")), layer_names=layer_names)

    def begin_step(
        self, block_table: np.ndarray, num_tokens: np.ndarray, is_decoding: np.ndarray
    ) -> StepCompaction:
        """What each layer attends to."""
        num_keys = -(-num_tokens // BOUND_SHARE)
        num_entries = -(-int(num_keys.max()) // self.block_tokens)
        table = np.ascontiguousarray(block_table[:, :num_entries])
        self.counts.num_keys += int(num_keys.sum())
        self.counts.num_full_keys += int(num_tokens.sum())
        return StepCompaction(
            tables=StepTables(block_table=table[None], num_keys=num_keys),
            block_table_by_layer_name=dict.fromkeys(self.layer_names, torch.from_numpy(table)),
            row_by_layer_name={},
            scored={},
            blocks=self.blocks,
            period=self.period,
        )


class LosslessEngine(Engine):
    """An engine whose drafts can be switched off between steps: it is stock vLLM then."""

    facts: ClassVar[dict[str, Any]] = {
        "policies": {"stock": None, "lossless": LOSSLESS_BUDGET},
        "reselect_every_tokens": LOSSLESS_EVERY_TOKENS,
        "num_draft_tokens": NUM_DRAFT_TOKENS,
    }

    def __init__(self, max_sequences: int, *, is_compiled: bool) -> None:
        self.start(
            max_sequences,
            asked(
                budget=LOSSLESS_BUDGET,
                policy="lossless",
                reselect_every_tokens=LOSSLESS_EVERY_TOKENS,
            ),
            enforce_eager=not is_compiled,
            speculative_config={
                "method": "custom_class",
                "model": PROPOSER,
                "num_speculative_tokens": NUM_DRAFT_TOKENS,
            },
        )
        self.drafting = self.builder.compaction
        self.propose = self.runner.drafter.propose

    def measure(self, num_sequences: int, context: int, num_rounds: int) -> dict[str, Any]:
        """Tokens a second with and without drafts."""
        self.switch(is_drafting=False)
        names = self.prefill(num_sequences, context)
        phases: dict[str, list[dict[str, float]]] = {"stock": [], "lossless": []}
        before = vars(self.drafting.counts).copy()
        for _ in range(num_rounds):
            for name, done in phases.items():
                self.switch(is_drafting=name == "lossless")
                for _ in range(3):  # scores, selects, drafts
                    self.step()
                done.append(self.phase())
        if len(self.running()) != num_sequences:
            sys.exit("a request ended or was preempted while it was measured; lower --rounds")
        counts = {key: value - before[key] for key, value in vars(self.drafting.counts).items()}
        self.core.abort_request(names)
        rate = {
            name: sum(phase["tokens"] for phase in done) / sum(phase["seconds"] for phase in done)
            for name, done in phases.items()
        }
        return {
            "sequences": num_sequences,
            "context": context,
            "tokens_per_s": {name: round(value, 1) for name, value in rate.items()},
            "tokens_per_s_of_stock": round(rate["lossless"] / rate["stock"], 3),
            "mean_step_ms": {
                name: round(
                    1e3 * sum(p["seconds"] for p in done) / sum(p["steps"] for p in done), 1
                )
                for name, done in phases.items()
            },
            "accepted_share_of_drafts": round(counts["num_accepted"] / counts["num_verified"], 3),
            "draft_forwards_a_step": round(counts["num_draft_forwards"] / counts["num_steps"], 2),
            "phases": phases,
        }

    def switch(self, *, is_drafting: bool) -> None:
        """Switches drafts on or off."""
        self.builder.compaction = self.drafting if is_drafting else None
        self.runner.drafter.propose = self.propose if is_drafting else no_drafts

    def phase(self) -> dict[str, float]:
        """Steps for a while."""
        before, begun, num_steps = self.num_output_tokens(), time.perf_counter(), 0
        while time.perf_counter() - begun < LOSSLESS_PHASE_S:
            self.step()
            num_steps += 1
        seconds = time.perf_counter() - begun
        return {
            "tokens": self.num_output_tokens() - before,
            "steps": num_steps,
            "seconds": round(seconds, 3),
        }

    def num_output_tokens(self) -> int:
        """Tokens that all running requests gained so far."""
        return sum(request.num_output_tokens for request in self.running())


def no_drafts(sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
    """In the place of a proposer."""
    return [[] for _ in sampled_token_ids]


def asked(**facts: Any) -> dict[str, Any]:
    """VLLM's `additional_config` for a policy."""
    return {CONFIG_KEY: facts}


if __name__ == "__main__":
    main()
