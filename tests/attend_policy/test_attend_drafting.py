"""The lossless policy's account of its drafts, step by step, from tables made up here."""

import numpy as np
import pytest

from blockcompact_jax.budget import parse_budget
from blockcompact_jax.geometry import ModelGeometry
from blockcompact_jax.kernels import Layout
from torch_bridge.vllm.config import AttendConfig
from torch_bridge.vllm.drafting import GroupDrafting

B, MAX_TOKENS, NUM_DRAFTS, CHUNK_TOKENS = 32, 512, 4, 128


@pytest.fixture(scope="module")
def drafting():
    geometry = ModelGeometry.uniform(
        num_layers=1,
        num_query_heads=2,
        num_kv_heads=1,
        head_dim=32,
        block_tokens=B,
        dtype="float32",
        layout="vec",
    )
    return GroupDrafting(
        AttendConfig(policy="lossless", budget=parse_budget("3b"), reselect_every_tokens=16),
        geometry=geometry,
        layer_names=["model.layers.0.attn"],
        layout=Layout.VEC,
        max_tokens=MAX_TOKENS,
    )


class OneRequest:
    """A request that is alone in its batch; keeps count of the drafts that it was given."""

    def __init__(self, drafting, first_block):
        self.drafting = drafting
        num_blocks = MAX_TOKENS // B
        self.table = np.arange(first_block, first_block + num_blocks, dtype=np.int32)[None]
        self.counts_before = vars(drafting.counts).copy()

    def step(self, num_computed, num_queries, num_confirmed):
        """Computes `num_queries` tokens; afterwards so many tokens are confirmed."""
        length = np.array([num_computed + num_queries], np.int32)
        queries = np.array([num_queries], np.int32)
        step = self.drafting.begin_verification(self.table, length, queries, np.array([True]))
        for scored in step.scored.values() if step is not None else ():
            scored.log_sum_exps[:] = 0.0
        return self.drafting.finish_verification(np.array([num_confirmed], np.int32))

    def draft(self, num_confirmed):
        lengths = np.array([num_confirmed], np.int32)
        self.drafting.draft_tables([0], lengths, num_draft_tokens=NUM_DRAFTS)

    def counted(self):
        now = vars(self.drafting.counts)
        names = ("num_verified", "num_accepted")
        return tuple(now[name] - self.counts_before[name] for name in names)


def test_drafts_that_a_step_verifies_are_counted(drafting):
    request = OneRequest(drafting, first_block=1)
    assert request.step(300, 1, 302) == [0], "the selection is there after the first step"
    assert request.counted() == (0, 0)
    request.draft(302)
    request.step(301, 1 + NUM_DRAFTS, 305)  # two of the drafts stand
    assert request.counted() == (NUM_DRAFTS, 2)
    request.step(304, 1, 306)  # nothing was drafted
    assert request.counted() == (NUM_DRAFTS, 2)


def test_drafts_that_the_engine_leaves_out_are_not_counted(drafting):
    request = OneRequest(drafting, first_block=20)
    request.step(300, 1, 302)
    request.draft(302)
    request.step(301, 1 + 1, 303)
    assert request.counted() == (1, 0)
    request.step(302, 1 + NUM_DRAFTS, 304)
    assert request.counted() == (1, 0), "drafts are verified once"


def test_tokens_that_a_preempted_request_computes_anew_are_no_drafts(drafting):
    """Its outputs stay confirmed all the while, more of them than a chunk computes."""
    request = OneRequest(drafting, first_block=40)
    for num_computed in range(0, 300 - CHUNK_TOKENS, CHUNK_TOKENS):
        request.step(num_computed, CHUNK_TOKENS, 301)
    assert request.step(256, 301 - 256, 302) == [0]
    assert request.counted() == (0, 0)
    request.draft(302)
    request.step(301, 1 + NUM_DRAFTS, 306)
    assert request.counted() == (NUM_DRAFTS, 3)
