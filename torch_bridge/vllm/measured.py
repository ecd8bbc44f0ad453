"""One configuration measured in vLLM: stock attention and a policy, one after the other.

    python -m torch_bridge.vllm.measured OPTIONS REPORT

`torch_bridge.vllm.sweep` starts it: vLLM's engine runs in this very process, so that one engine can
decode with stock attention, which it does without a policy, and with the policy. REPORT gets a JSON
object; of a fault its one line, as `error`.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockcompact_jax.budget import effective_budget_blocks, parse_budget
from blockcompact_jax.errors import CompactionError
from torch_bridge.vllm.config import CONFIG_KEY
from torch_bridge.vllm.sweep import ENGINES, VllmRunOptions

_WARM_UP_TOKENS = 12
_WARM_UP_BLOCKS_BEYOND_BUDGET = 2
"""Up to its budget a request attends to everything: nothing scores or selects."""
_SECRET_ENDINGS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """One decoding.

    Attributes:
        token_ids: the new tokens.
        prefill_seconds: until the first of them.
        decode_seconds: from there to the last.
        num_first_tokens: tokens that the prefill gave.
        num_steps: engine steps after it.
        pool_blocks_prefilled: vLLM's blocks in use after the prefill; None where no step follows
            it, for then they are free again.
        pool_blocks_last: the same before the last step.
    """

    token_ids: list[int]
    prefill_seconds: float
    decode_seconds: float
    num_first_tokens: int
    num_steps: int
    pool_blocks_prefilled: int | None
    pool_blocks_last: int | None

    @property
    def tokens_per_second(self) -> float | None:
        """Without the first token; None where there was only that."""
        num_tokens = len(self.token_ids) - self.num_first_tokens
        return num_tokens / self.decode_seconds if num_tokens else None


class MeasuredEngine:
    """One vLLM engine whose policy can be taken away and given back."""

    def __init__(self, options: VllmRunOptions) -> None:
        """Loads the model.

        Raises:
            CompactionError: where the plugin is not loaded.
        """
        from vllm import LLM

        from torch_bridge.models.load import locate_model
        from torch_bridge.models.progress import SilentObserver

        policy = ENGINES[options.engine].policy
        path = locate_model(options.model, SilentObserver())
        arguments: dict[str, Any] = {"dtype": options.dtype}
        if policy == "lossless":
            from torch_bridge.vllm.engine_checks import PROPOSER

            arguments["speculative_config"] = {
                "method": "custom_class",
                "model": PROPOSER,
                "num_speculative_tokens": options.num_draft_tokens,
            }
        max_tokens = options.context_tokens + options.num_new_tokens + options.num_draft_tokens
        self._llm = LLM(
            model=options.model if path is None else str(path),
            seed=options.seed,
            max_model_len=max_tokens,
            max_num_batched_tokens=max_tokens,
            max_num_seqs=1,
            block_size=options.block_tokens,
            enforce_eager=True,
            enable_prefix_caching=False,
            async_scheduling=False,
            additional_config={
                CONFIG_KEY: {
                    "policy": policy,
                    "budget": str(options.budget),
                    "reselect_every_tokens": options.reselect_every_tokens,
                }
            },
            **arguments,
        )
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self.runner = self._engine.model_executor.driver_worker.worker.model_runner
        builders = [
            builder
            for groups in self.runner.attn_groups
            for group in groups
            for builder in group.metadata_builders
        ]
        self._compactions = {
            builder: builder.compaction
            for builder in builders
            if getattr(builder, "compaction", None) is not None
        }
        if not self._compactions:
            raise CompactionError(
                "vLLM did not load the plugin 'blockcompact'; install blockcompact-jax where vLLM "
                "runs, and leave VLLM_PLUGINS unset or name it there."
            )
        self._drafter = getattr(self.runner, "drafter", None) if policy == "lossless" else None
        self._propose = self._drafter and self._drafter.propose
        self._num_requests = 0

    @property
    def tokenizer(self) -> Any:
        """Of the model."""
        return self._llm.get_tokenizer()

    def counts(self) -> dict[str, int]:
        """What the policy did so far, over all groups."""
        found: dict[str, int] = {}
        for compaction in self._compactions.values():
            for name, value in vars(compaction.counts).items():
                found[name] = found.get(name, 0) + value
        return found

    def switch(self, *, has_policy: bool) -> None:
        """Gives the engine its policy, or stock attention."""
        for builder, compaction in self._compactions.items():
            builder.compaction = compaction if has_policy else None
        if self._drafter is not None:
            self._drafter.propose = self._propose if has_policy else _no_drafts

    def decode(self, token_ids: list[int], num_new_tokens: int) -> Decoded:
        """Decodes greedily, step by step; ends where a run with transformers does."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_new_tokens, detokenize=False)
        self._num_requests += 1
        self._engine.add_request(
            f"request-{self._num_requests}", {"prompt_token_ids": token_ids}, params
        )
        tokens: list[int] = []
        begin = first = last = time.perf_counter()
        num_first, num_steps = 0, 0
        blocks: list[int] = []
        while self._engine.has_unfinished_requests():
            outputs: Any = self._engine.step()
            last = time.perf_counter()
            for output in outputs:
                tokens = list(output.outputs[0].token_ids)
            if tokens and not num_first:
                first, num_first = last, len(tokens)
            elif num_first:
                num_steps += 1
            if tokens and self._engine.has_unfinished_requests():
                blocks.append(self._num_used_blocks())
        return Decoded(
            token_ids=tokens,
            prefill_seconds=first - begin,
            decode_seconds=last - first,
            num_first_tokens=num_first,
            num_steps=num_steps,
            pool_blocks_prefilled=blocks[0] if blocks else None,
            pool_blocks_last=blocks[-1] if blocks else None,
        )

    def _num_used_blocks(self) -> int:
        pool = self._scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # less the null block


def _no_drafts(sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
    """In the place of a proposer."""
    return [[] for _ in sampled_token_ids]


def measure(options: VllmRunOptions) -> dict[str, Any]:
    """Decodes with stock attention and with the policy.

    Args:
        options: what to run.

    Returns:
        A report with the names of `blockcompact run --json` where they mean the same.

    Raises:
        CompactionError: where the plugin is not loaded.
    """
    import torch

    from torch_bridge.huggingface.identity import weights_name
    from torch_bridge.prompts import build_prompt

    variables = _variables()  # before vLLM sets some itself, to names of this process alone
    begin = time.perf_counter()
    engine = MeasuredEngine(options)
    load_seconds = time.perf_counter() - begin
    prompt = build_prompt(engine.tokenizer, context_tokens=options.context_tokens).token_ids
    warm_up_prompt = prompt[: _num_warm_up_tokens(options, len(prompt))]
    engine.decode(warm_up_prompt, _WARM_UP_TOKENS)
    full = None
    if options.compare_full:
        engine.switch(has_policy=False)
        engine.decode(warm_up_prompt, _WARM_UP_TOKENS)
        full = engine.decode(prompt, options.num_new_tokens)
        engine.switch(has_policy=True)
    before = engine.counts()
    given = engine.decode(prompt, options.num_new_tokens)
    counts = {name: value - before[name] for name, value in engine.counts().items()}
    return {
        **_facts(options, len(prompt)),
        "weights": weights_name(engine.runner.model),
        "token_ids": given.token_ids,
        **_comparison(given, full),
        **_shares(counts, given, is_lossless=ENGINES[options.engine].policy == "lossless"),
        "seconds": {
            "load": load_seconds,
            "prefill": given.prefill_seconds,
            "prefill_full": full and full.prefill_seconds,
            "full_decode": full and full.decode_seconds,
            "compacted_decode": given.decode_seconds,
        },
        "pool_blocks": {"prefilled": given.pool_blocks_prefilled, "last": given.pool_blocks_last},
        "environment": {"num_threads": torch.get_num_threads(), "variables": variables},
        "metrics": {},  # vLLM's blocks are not moved, and nothing is booked here
    }


def _num_warm_up_tokens(options: VllmRunOptions, num_prompt_tokens: int) -> int:
    """Of the prompt's beginning, which is decoded before anything is timed."""
    whole = num_prompt_tokens // options.block_tokens
    num_blocks = effective_budget_blocks(options.budget, whole) + _WARM_UP_BLOCKS_BEYOND_BUDGET
    return min(num_prompt_tokens, num_blocks * options.block_tokens)


def _variables() -> dict[str, str]:
    """The environment variables of vLLM that are set; a secret's value is not told."""
    names = sorted(name for name in os.environ if name.startswith("VLLM_"))
    return {name: "(set)" if name.endswith(_SECRET_ENDINGS) else os.environ[name] for name in names}


def _facts(options: VllmRunOptions, num_context_tokens: int) -> dict[str, Any]:
    whole = num_context_tokens // options.block_tokens
    return {
        "model": options.model,
        "dtype": options.dtype,
        "context_tokens": num_context_tokens,
        "block_tokens": options.block_tokens,
        "budget": str(options.budget),
        "budget_blocks": effective_budget_blocks(options.budget, whole),
        "is_compiled": False,
    }


def _comparison(given: Decoded, full: Decoded | None) -> dict[str, Any]:
    rate, full_rate = given.tokens_per_second, full and full.tokens_per_second
    pairs = zip(given.token_ids, full.token_ids if full else [], strict=False)
    differing = [place for place, (one, other) in enumerate(pairs) if one != other]
    is_same = None if full is None else given.token_ids == full.token_ids
    return {
        "new_tokens": len(given.token_ids),
        "tokens_identical_to_full": is_same,
        "first_divergence": {"position": differing[0]} if differing else None,
        "tokens_per_second": rate,
        "tokens_per_second_full": full_rate,
        "speedup_vs_full": rate / full_rate if rate and full_rate else None,
    }


def _shares(counts: dict[str, int], given: Decoded, *, is_lossless: bool) -> dict[str, Any]:
    """Keys that decoding, or drafting, attended to; what of the drafts was accepted."""
    num_verified = counts.get("num_verified", 0)
    num_tokens = len(given.token_ids) - given.num_first_tokens
    has_rounds = is_lossless and given.num_steps
    return {
        "attended_share_of_keys": _ratio(counts["num_keys"], counts["num_full_keys"]),
        "num_scored": counts["num_scored"],
        "acceptance_rate": _ratio(counts.get("num_accepted", 0), num_verified),
        "tokens_per_round": num_tokens / given.num_steps if has_rounds else None,
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def main() -> None:
    """Reads options, writes a report. One line of a fault is the report's."""
    request, answer = json.loads(sys.argv[1]), Path(sys.argv[2])
    try:
        options = VllmRunOptions(**{**request, "budget": parse_budget(request["budget"])})
        report = measure(options)
    except Exception as fault:  # whatever it is, the sweep's row says it
        report = {"error": " ".join(f"{type(fault).__name__}: {fault}".split())}
    answer.write_text(json.dumps(report, allow_nan=False), encoding="utf-8")


if __name__ == "__main__":
    main()
