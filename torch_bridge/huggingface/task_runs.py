"""Runs the configurations of a sweep over quality tasks: full attention beside an `AttendCache`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blockcompact_jax.budget import Budget, OptionError, effective_budget_blocks, parse_budget
from blockcompact_jax.sweep.grid import Configuration
from blockcompact_jax.sweep.options import complete_configuration
from torch_bridge.huggingface.options import RunOptions, check_counts
from torch_bridge.tasks import TASKS, TaskCase, TaskText, make_case, parse_tasks

if TYPE_CHECKING:
    from torch_bridge.huggingface.task_answers import Answer

DEFAULT_TASK_GRID: dict[str, list[Any]] = {"budget": ["10%", "25%", "50%"]}
"""What a sweep over tasks runs without options."""


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """What tasks are run with.

    Attributes:
        tasks: Names of tasks, parted by commas.
        model: As of `RunOptions`, as are the fields of equal names.
        dtype: Data type of weights and KV.
        context: Tokens of every case's context, at least 2: its last one already decodes.
        cases: Cases of each task, at evenly spread depths.
        block_tokens: Tokens per block.
        layout: Packed layout of the full KV.
        attention: "blocks" or "gathered".
        budget: Blocks that each layer attends to.
        reselect_every_tokens: Decoded tokens between two selections.
        seed: Seed of the cases.
    """

    tasks: str = ",".join(TASKS)
    model: str = "smollm2-135m"
    dtype: str = "float32"
    context: int = 1024
    cases: int = 4
    block_tokens: int = 32
    layout: str = "amx"
    attention: str = "blocks"
    budget: Budget = field(default_factory=lambda: Budget(fraction=0.25))
    reselect_every_tokens: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        parse_tasks(self.tasks)
        check_counts(cases=self.cases, reselect_every_tokens=self.reselect_every_tokens)
        # The options that a run has too are checked as its own.
        values: Any = {name: getattr(self, name) for name in _OPTIONS_OF_A_RUN}
        RunOptions(context_tokens=self.context, **values)
        if self.context < _MIN_CONTEXT_TOKENS:
            raise OptionError(
                f"`context` is {self.context}, expected at least {_MIN_CONTEXT_TOKENS} tokens: the "
                "last one already decodes, after the others"
            )


_MIN_CONTEXT_TOKENS = 2
_OPTIONS_OF_A_RUN = ("model", "dtype", "block_tokens", "layout", "attention", "budget", "seed")
TASK_OPTIONS = tuple(TaskOptions.__dataclass_fields__)
"""Names in a sweep over tasks: the fields of `TaskOptions`."""


def complete_task_run(configuration: Mapping[str, Any]) -> Configuration:
    """Every option of a configuration, as plain values; tasks in one order.

    Raises:
        OptionError: If a name is unknown or a value cannot be used.
    """
    names = {name: name for name in TASK_OPTIONS}
    plain = complete_configuration(configuration, names=names, defaults=TaskOptions())
    return {**plain, "tasks": ",".join(parse_tasks(_options_of(plain).tasks))}


def _options_of(configuration: Mapping[str, Any]) -> TaskOptions:
    return TaskOptions(**{**configuration, "budget": parse_budget(str(configuration["budget"]))})


class TaskRuns:
    """Runs configurations; a model is loaded once, and answers with full attention once a case."""

    def __init__(self) -> None:
        """Nothing is loaded before the first run."""
        self._loaded: Any = None
        self._key: tuple[str, str] | None = None
        self._text: Any = None
        self._full: dict[tuple[str, int, int, int, int], tuple[TaskCase, Answer]] = {}

    def run(self, configuration: Mapping[str, Any]) -> dict[str, Any]:
        """Answers every case of the tasks.

        Raises:
            OptionError: If the configuration does not fit the model or a task.
            ModelError: If the model cannot be loaded.
        """
        from torch_bridge.huggingface.identity import weights_name

        options = _options_of(configuration)
        self._load(options)
        cases = {name: self._run_task(name, options) for name in parse_tasks(options.tasks)}
        times = {name: task_seconds(outcomes) for name, outcomes in cases.items()}
        return {
            "weights": weights_name(self._loaded.model),
            "context_tokens": options.context,
            "block_tokens": options.block_tokens,
            "budget_blocks": effective_budget_blocks(
                options.budget, options.context // options.block_tokens
            ),
            "metrics": {},  # nothing is booked by its name here
            "tasks": {name: summary(outcomes) for name, outcomes in cases.items()},
            "task_seconds": times,
            **_speeds(times.values()),
        }

    def _load(self, options: TaskOptions) -> None:
        from torch_bridge.huggingface.run import DTYPES
        from torch_bridge.models.load import load_model

        key = (options.model, options.dtype)
        if key != self._key:
            self._loaded, self._key, self._full = None, None, {}
            self._loaded = load_model(options.model, dtype=DTYPES[options.dtype])
            self._text, self._key = TaskText(self._loaded.tokenizer), key

    def _run_task(self, task: str, options: TaskOptions) -> list[dict[str, Any]]:
        from torch_bridge.huggingface.task_answers import answer_with_blocks

        outcomes: list[dict[str, Any]] = []
        for number in range(options.cases):
            case, full = self._full_answer(task, number, options)
            given = answer_with_blocks(
                self._loaded.model,
                case,
                budget=options.budget,
                reselect_every_tokens=options.reselect_every_tokens,
                block_tokens=options.block_tokens,
                layout=options.layout,
                attention=options.attention,
            )
            outcomes.append(
                {
                    "depth": case.depth,
                    "answer": case.answer,
                    "given": given.token_ids,
                    "full": full.token_ids,
                    "answers": (given, full),
                }
            )
        return outcomes

    def _full_answer(self, task: str, number: int, options: TaskOptions) -> tuple[TaskCase, Answer]:
        from torch_bridge.huggingface.task_answers import answer_with_all

        key = (task, number, options.cases, options.context, options.seed)
        if key not in self._full:
            case = make_case(
                task,
                self._text,
                context_tokens=options.context,
                case=number,
                num_cases=options.cases,
                seed=options.seed,
            )
            self._check_fit(case)
            self._full[key] = (case, answer_with_all(self._loaded.model, case))
        return self._full[key]

    def _check_fit(self, case: TaskCase) -> None:
        num_tokens, most = len(case.context) + len(case.answer), self._loaded.max_positions
        if most is not None and num_tokens > most:
            raise OptionError(
                f"`context` {len(case.context):,} with an answer of {len(case.answer)} tokens "
                f"exceeds the {most:,} positions of {self._loaded.name}; lower it"
            )


def summary(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares over the cases of a task.

    Args:
        outcomes: Of each case "depth", and the vocabulary IDs "answer", "given" with selected
            blocks and "full" with full attention, all of one length.

    Returns:
        "accuracy" is the share of whole answers found, "token_accuracy" that of their tokens, with
        "_full" behind the name of full attention; "agreement" is the share of tokens where both say
        the same; "cases" has the depth of each case, and its share of tokens.
    """

    def share(side: str, other: str) -> float:
        pairs = [pair for each in outcomes for pair in zip(each[side], each[other], strict=True)]
        return sum(one == two for one, two in pairs) / len(pairs)

    def whole(side: str) -> float:
        return sum(each[side] == each["answer"] for each in outcomes) / len(outcomes)

    return {
        "num_cases": len(outcomes),
        "accuracy": whole("given"),
        "accuracy_full": whole("full"),
        "token_accuracy": share("given", "answer"),
        "token_accuracy_full": share("full", "answer"),
        "agreement": share("given", "full"),
        "cases": [
            {"depth": each["depth"], **{side: _hits(each, side) for side in ("given", "full")}}
            for each in outcomes
        ],
    }


def task_seconds(outcomes: list[dict[str, Any]]) -> dict[str, float | int]:
    """Times of a task, summed up over its cases.

    Args:
        outcomes: Of each case "answers": that with selected blocks, and that with full attention.

    Returns:
        "num_tokens" of the answers, "prefill" and "decode" as `Answer` has them, with "_full"
        behind the name of full attention. Full attention answers each case once for all
        configurations of a sweep, and that time stands in each of their rows.
    """
    sides = {"": 0, "_full": 1}
    return {
        "num_tokens": sum(len(each["answer"]) for each in outcomes),
        **{
            f"{part}{suffix}": sum(
                getattr(each["answers"][side], f"{part}_seconds") for each in outcomes
            )
            for part in ("prefill", "decode")
            for suffix, side in sides.items()
        },
    }


def _speeds(times: Collection[Mapping[str, float | int]]) -> dict[str, float]:
    """Rates of decoding over all tasks, prefills left out."""
    total = {name: sum(each[name] for each in times) for name in ("num_tokens", *_DECODED)}
    own, full = (total["num_tokens"] / total[name] for name in _DECODED)
    return {
        "tokens_per_second": own,
        "tokens_per_second_full": full,
        "speedup_vs_full": own / full,
    }


_DECODED = ("decode", "decode_full")


def _hits(outcome: dict[str, Any], side: str) -> float:
    answer: list[int] = outcome["answer"]
    return sum(a == b for a, b in zip(outcome[side], answer, strict=True)) / len(answer)
