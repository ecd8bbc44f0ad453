"""The main job: load a model, prefill a long context, decode with block-compacted KV, compare."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from blockcompact_jax.budget import OptionError
from blockcompact_jax.calibration import read_calibration
from blockcompact_jax.kernels import Layout
from blockcompact_jax.reselection import OnlineReselection
from torch_bridge.huggingface.attention import STOCK_ATTENTION
from torch_bridge.huggingface.baseline import FullDecode, StockPrefix, decode_full
from torch_bridge.huggingface.calibrate import calibration_facts
from torch_bridge.huggingface.geometry import DTYPE_NAMES
from torch_bridge.huggingface.options import NullObserver, RunObserver, RunOptions
from torch_bridge.huggingface.policies import score_source
from torch_bridge.huggingface.report import RunReport, make_report
from torch_bridge.huggingface.sampling import Sampler
from torch_bridge.huggingface.session import CompactionSession, SessionLimits
from torch_bridge.huggingface.speculate import decode_speculative, warm_up
from torch_bridge.models.load import LoadedModel, load_model
from torch_bridge.prompts import Prompt, build_prompt

if TYPE_CHECKING:
    from torch_bridge.huggingface.remote import RemoteOptions

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def run_decoding(
    options: RunOptions,
    *,
    observer: RunObserver | None = None,
    remote: RemoteOptions | None = None,
    loaded: LoadedModel | None = None,
) -> RunReport:
    """Runs the main job.

    Args:
        options: what to run; checked already.
        observer: hears of stages, progress and text.
        remote: server that verifies; None to verify in this process. Closed at the end.
        loaded: the model of `options`, in their dtype; None to load it.

    Returns:
        What was measured.

    Raises:
        OptionError: if the options do not fit the model or the prompt.
        ModelError: if the model cannot be loaded.
        PromptError: if the prompt cannot be used.
        UnsupportedLayoutError: if the packed layout cannot hold the model's blocks.
        CompactionError: if the file of calibrated costs is not one of this configuration.
    """
    watcher = observer or NullObserver()
    if loaded is None:
        loaded = load_model(options.model, dtype=DTYPES[options.dtype], observer=watcher)
    prompt = build_prompt(
        loaded.tokenizer,
        context_tokens=options.context_tokens,
        prompt=options.prompt,
        prompt_file=options.prompt_file,
    )
    _check_fit(options, prompt.num_tokens, loaded)
    num_draft_tokens = _num_draft_tokens(options)
    sides: dict[str, Any] = {
        "model": loaded.model,
        "limits": SessionLimits(
            # The last round drafts past the tokens asked for.
            max_tokens=prompt.num_tokens + options.num_new_tokens + num_draft_tokens,
            num_draft_tokens=num_draft_tokens,
            num_lookup_tokens=options.num_lookup_tokens,
            reselect_every_rounds=options.reselect_every_rounds,
            block_tokens=options.block_tokens,
            budget=options.budget,
        ),
        "score_source": score_source(options.policy, seed=options.seed),
        "layout": Layout[options.layout.upper()],
        "attention": options.attention,
        "online": _online(options, prompt.num_tokens),
        "has_course": options.has_course,
    }
    with _new_session(sides, remote) as session:
        return _run_session(options, watcher, loaded, prompt, session)


def _new_session(sides: dict[str, Any], remote: RemoteOptions | None) -> CompactionSession:
    if remote is None:
        return CompactionSession(**sides)
    from torch_bridge.huggingface.remote import RemoteSession

    return RemoteSession(**sides, **vars(remote))


def _online(options: RunOptions, num_context_tokens: int) -> OnlineReselection | None:
    """How an online choice of the period starts; None for the fixed period."""
    if not options.is_reselecting_online:
        return None
    if options.costs_file is None:
        return OnlineReselection()
    facts = calibration_facts(options, num_context_tokens)
    return read_calibration(options.costs_file, facts=facts)


def _num_draft_tokens(options: RunOptions) -> int:
    """Drafted tokens a round: no more than there are tokens to decode after the first."""
    return max(1, min(options.num_draft_tokens, options.num_new_tokens - 1))


def _check_fit(options: RunOptions, num_context_tokens: int, loaded: LoadedModel) -> None:
    """Refuses options that do not fit the model or the prompt, before anything is allocated."""
    max_positions = loaded.max_positions
    num_after = options.num_new_tokens + _num_draft_tokens(options)
    if max_positions is not None and num_context_tokens + num_after > max_positions:
        remedy = f"Lower `context` to at most {max_positions - num_after:,}"
        if num_after >= max_positions:
            remedy = f"Lower `new-tokens` below {max_positions:,}"
        raise OptionError(
            f"`context` {num_context_tokens:,} with {options.num_new_tokens:,} new tokens and "
            f"{_num_draft_tokens(options)} drafted ones needs "
            f"{num_context_tokens + num_after:,} positions; {loaded.name} has "
            f"{max_positions:,}. {remedy}"
        )
    if max_positions is not None and options.block_tokens > max_positions:
        raise OptionError(
            f"`block-tokens` is {options.block_tokens:,}; expected at most the {max_positions:,} "
            f"positions of {loaded.name}"
        )


def _run_session(
    options: RunOptions,
    watcher: RunObserver,
    loaded: LoadedModel,
    prompt: Prompt,
    session: CompactionSession,
) -> RunReport:
    model: PreTrainedModel = loaded.model
    context = prompt.token_ids
    eos_token_ids = _eos_token_ids(model)
    watcher.on_stage("compiling the planning step", None)
    begin = time.perf_counter()
    session.warm_up()
    sampler = Sampler(temperature=options.temperature, seed=options.seed)
    warm_up(sampler, session.limits.num_draft_tokens, model.config.get_text_config().vocab_size)
    compile_seconds = time.perf_counter() - begin
    tokens = f"{len(context):,}"
    # The built-in text is as long as is asked for; of a text that was given, some may be left out.
    if prompt.is_cut and (options.prompt is not None or options.prompt_file is not None):
        tokens = f"the first {tokens} of {prompt.num_available_tokens:,}"
    watcher.on_stage(f"prefilling {tokens} tokens", None)
    begin = time.perf_counter()
    logits = session.prefill(context)
    prefill_seconds = time.perf_counter() - begin
    prefix = StockPrefix(session.cache) if options.compare_full else None
    first_token = sampler.choose(logits)
    watcher.on_stage("decoding with compacted KV", options.num_new_tokens)
    text = TextStream(loaded.tokenizer, watcher)
    begin = time.perf_counter()
    compacted = decode_speculative(
        session,
        context,
        first_token=first_token,
        num_tokens=options.num_new_tokens,
        sampler=sampler,
        eos_token_ids=eos_token_ids,
        on_tokens=text.add,
    )
    compacted_seconds = time.perf_counter() - begin
    text.end()
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    full = None
    if prefix is not None:
        model.set_attn_implementation(STOCK_ATTENTION)
        full = _decode_full(options, watcher, model, prefix, compacted.tokens)
    return make_report(
        options=options,
        loaded=loaded,
        session=session,
        num_context_tokens=len(context),
        compile_seconds=compile_seconds,
        prefill_seconds=prefill_seconds,
        compacted=compacted,
        compacted_seconds=compacted_seconds,
        full=full,
        peak_bytes=peak_bytes,
    )


def _decode_full(
    options: RunOptions,
    watcher: RunObserver,
    model: PreTrainedModel,
    prefix: StockPrefix,
    compacted_tokens: list[int],
) -> FullDecode:
    watcher.on_stage("decoding with the full KV", options.num_new_tokens)
    return decode_full(
        model,
        prefix.to_stock(model.config),
        first_token=compacted_tokens[0],
        num_tokens=options.num_new_tokens,
        sampler=Sampler(temperature=options.temperature, seed=options.seed),
        eos_token_ids=_eos_token_ids(model),
        compare_with=compacted_tokens,
        on_progress=watcher.on_progress,
    )


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    eos: Any = model.generation_config.eos_token_id if model.generation_config else None
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


class TextStream:
    """Turns tokens into text as they come, and counts them for the progress display.

    A token may end inside of a character: text is handed on only when it can no longer change.
    """

    def __init__(self, tokenizer: Any, watcher: RunObserver) -> None:
        self._tokenizer = tokenizer
        self._watcher = watcher
        self._tokens: list[int] = []
        self._num_shown = 0

    def add(self, tokens: list[int]) -> None:
        """Takes the next tokens."""
        self._tokens += tokens
        text = self._tokenizer.decode(self._tokens)
        if not text.endswith("\ufffd"):
            self._show(text)
        self._watcher.on_progress(len(self._tokens))

    def end(self) -> None:
        """Shows what was held back."""
        self._show(self._tokenizer.decode(self._tokens))

    def _show(self, text: str) -> None:
        if len(text) > self._num_shown:
            self._watcher.on_text(text[self._num_shown :])
            self._num_shown = len(text)
