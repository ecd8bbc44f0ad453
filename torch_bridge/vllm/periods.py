"""When requests of one KV-cache group are scored again: a fixed period, or one chosen online.

Where decoding reads the selected blocks ("attend"), the attention mass that held selections lost
chooses; where they only draft ("lossless"), the time a token does, from what rounds took and
gained. One period serves all requests of the group.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Float32

from blockcompact_jax.costs import RetainCosts, assumed, measured
from blockcompact_jax.decision_log import DecisionLog
from blockcompact_jax.period import PeriodByCosts
from blockcompact_jax.round_curves import RoundSample
from torch_bridge.held import AUTO, Blocks, HoldingPeriod, open_log
from torch_bridge.vllm.config import DEFAULT_EVERY_TOKENS, AttendConfig
from torch_bridge.vllm.requests import DecodingRequest

if TYPE_CHECKING:
    from torch_bridge.vllm.compaction import ScoredRequest

_FIRST_ROUNDS = 4


class ScoringPeriod:
    """The period of a group whose decoding reads the selected blocks, or a fixed one.

    Attributes:
        group: name of the group's first layer.
        scoring_us: time of scoring in this step so far; the step's layers add to it.
    """

    def __init__(self, config: AttendConfig, log: DecisionLog | None, *, group: str) -> None:
        """Starts with the first period.

        Args:
            config: the policy.
            log: where decisions go.
            group: what they call the group.
        """
        self.group = group
        every = config.reselect_every_tokens
        is_by_costs = every == AUTO and config.policy == "lossless"
        self._holding = HoldingPeriod(
            DEFAULT_EVERY_TOKENS if is_by_costs else every,
            first_tokens=DEFAULT_EVERY_TOKENS,
            max_mass_lost=config.max_mass_lost,
            log=log,
        )
        self.scoring_us = 0.0

    @property
    def every_tokens(self) -> int:
        """Most tokens between two scorings of a request."""
        return self._holding.choice.period

    @contextmanager
    def selecting(self, scored: ScoredRequest, *, num_scored: int) -> Iterator[None]:
        """Surrounds the selection of one request, and books it.

        Args:
            scored: the request with its scores, its old selection still in place.
            num_scored: requests scored in the step, which shared its time.
        """
        request, held = scored.request, _blocks(scored.request)
        age_tokens = request.num_tokens - request.selected_at_tokens
        begin = time.perf_counter()
        yield
        select_us = (time.perf_counter() - begin) * 1e6 + self.scoring_us / num_scored
        request.selected_at_tokens = request.num_tokens
        self._book(scored, held, age_tokens=age_tokens, select_us=select_us)

    def _book(
        self, scored: ScoredRequest, held: Blocks | None, *, age_tokens: int, select_us: float
    ) -> None:
        is_whole = scored.own_blocks.size == scored.request.physical_blocks.size
        if not self._holding.is_asking or held is None or not is_whole:
            return
        self._holding.book(
            _mass(scored.log_sum_exps).mean(axis=1),
            held=held,
            age_tokens=age_tokens,
            num_tokens=scored.request.num_tokens,
            select_us=select_us,
            group=self.group,
            request=int(scored.request.physical_blocks[0]),
        )


class DraftingPeriod(ScoringPeriod):
    """The period of a group that drafts: chosen by the time a token.

    A round is the time between two ends of verification with one step between them, its share of
    one request, and without scoring and selecting, which are the cost of a selection.
    """

    def __init__(self, config: AttendConfig, log: DecisionLog | None, *, group: str) -> None:
        """As `ScoringPeriod`."""
        super().__init__(config, log, group=group)
        self._log = log
        self._by_costs = PeriodByCosts(first_rounds=_FIRST_ROUNDS)
        self._age_rounds: WeakKeyDictionary[DecodingRequest, int] = WeakKeyDictionary()
        self._ended, self._num_steps = time.perf_counter(), 0
        self._selecting_us = 0.0

    @property
    def every_tokens(self) -> int:
        """Tokens after which about the chosen number of rounds has run."""
        tokens_per_round = self._by_costs.tokens_per_round
        if tokens_per_round is None:
            return DEFAULT_EVERY_TOKENS
        # The round that is half a round early or more is the one.
        return max(1, round((self._by_costs.choice.period - 0.5) * tokens_per_round))

    def begin_rounds(self, verifying: Iterable[DecodingRequest]) -> None:
        """Begins a step. One that drafts nothing afterwards does not end: its time is no round's.

        Args:
            verifying: requests whose drafts it verifies.
        """
        self._num_steps += 1
        for request in verifying:
            self._age_rounds[request] = self._age_rounds.get(request, 0) + 1

    def end_rounds(self, gained: Mapping[DecodingRequest, int], *, is_alone: bool) -> None:
        """Books a step that verified drafts, before its scores are selected by.

        Args:
            gained: tokens that each request with drafts gained.
            is_alone: whether the step did nothing else, so that its time is that of the rounds.
        """
        now = time.perf_counter()
        spent_us = (now - self._ended) * 1e6 - self._selecting_us - self.scoring_us
        is_timed = is_alone and spent_us > 0 and self._num_steps == 1
        self._ended, self._num_steps, self._selecting_us = now, 0, 0.0
        for request, num_gained in gained.items():
            if is_timed and num_gained:
                self._by_costs.book_round(
                    RoundSample(
                        age_rounds=self._age_rounds[request] - 1,
                        round_us=spent_us / len(gained),
                        num_gained_tokens=num_gained,
                    )
                )

    def _book(
        self, scored: ScoredRequest, held: Blocks | None, *, age_tokens: int, select_us: float
    ) -> None:
        self._selecting_us += select_us
        age_rounds = self._age_rounds.get(scored.request, 0)
        self._age_rounds[scored.request] = 0
        if held is None:  # the first selection says nothing of the later ones
            return
        # Tables are made for every draft anyhow; nobody is told, waited for or moved.
        nothing = assumed(0.0)
        costs = RetainCosts(
            plan=measured(select_us),
            table_update=nothing,
            metadata=nothing,
            wait=nothing,
            allocator=nothing,
            kv_move=nothing,
        )
        self._by_costs.book_selection(costs)
        if self._log is None:
            return
        self._log.add(
            {
                "group": self.group,
                "request": int(scored.request.physical_blocks[0]),
                "num_tokens": scored.request.num_tokens,
                "age_tokens": age_tokens,
                "age_rounds": age_rounds,
                "select_us": select_us,
                **self._by_costs.decision_row(),
                "next_period_tokens": self.every_tokens,
            }
        )


def scoring_period(config: AttendConfig, *, layer_names: Sequence[str]) -> ScoringPeriod:
    """The period that a group's policy asks for.

    Args:
        config: the policy.
        layer_names: of the group; the log names the first with each decision.

    Raises:
        CompactionError: if the log of decisions cannot be written.
    """
    log = open_log(
        config.decision_log,
        engine="vllm",
        policy=config.policy,
        budget=str(config.budget),
    )
    is_by_costs = config.policy == "lossless" and config.reselect_every_tokens == AUTO
    return (DraftingPeriod if is_by_costs else ScoringPeriod)(config, log, group=layer_names[0])


def _mass(
    log_sum_exps: Float32[np.ndarray, "row query_head columns"],
) -> Float32[np.ndarray, "row query_head columns"]:
    """In NumPy, for arrays of many shapes; the selection has found them finite."""
    shares = np.exp(log_sum_exps - log_sum_exps.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def _blocks(request: DecodingRequest) -> Blocks | None:
    if request.selected is None:
        return None
    return Blocks(request.selected, request.num_candidate_blocks)
