"""What one configuration of vLLM measures and reports, with stand-ins in the place of vLLM."""

import os
import sys
from types import SimpleNamespace

import pytest

from blockcompact_jax.budget import parse_budget
from torch_bridge.vllm import measured
from torch_bridge.vllm.measured import Decoded, MeasuredEngine
from torch_bridge.vllm.sweep import VllmRunOptions


class FakeSteps:
    """A request whose tokens come one a step; a block of the pool is taken with each."""

    def __init__(self, num_tokens):
        self.tokens, self.num_tokens = [], num_tokens
        self.block_pool = SimpleNamespace(
            num_gpu_blocks=101, get_num_free_blocks=lambda: 90 - len(self.tokens)
        )

    def add_request(self, *_):
        self.tokens = []

    def has_unfinished_requests(self):
        return len(self.tokens) < self.num_tokens

    def step(self):
        self.tokens.append(7)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=self.tokens)])]


@pytest.mark.parametrize(
    ("num_tokens", "blocks"), [(1, (None, None)), (2, (11, 11)), (4, (11, 13))]
)
def test_MON_1_blocks_in_use_are_none_where_no_step_follows_the_prefill(
    monkeypatch, num_tokens, blocks
):
    """MON-1: also where the first token ends the text; they are free by then, and no 0."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    engine = MeasuredEngine.__new__(MeasuredEngine)
    steps = FakeSteps(num_tokens)
    engine._engine, engine._num_requests = steps, 0
    engine._scheduler = SimpleNamespace(kv_cache_manager=steps)
    done = engine.decode([1, 2], 4)
    assert done.token_ids == [7] * num_tokens
    assert (done.pool_blocks_prefilled, done.pool_blocks_last) == blocks


class FakeEngine:
    """Notes what it decodes, and how."""

    def __init__(self, options):
        self.decoded, self.has_policy = [], True
        self.tokenizer, self.runner = None, SimpleNamespace(model=None)
        FakeEngine.newest = self
        os.environ["VLLM_DIST_IDENT"] = "set by vLLM itself"

    def counts(self):
        return {"num_keys": 0, "num_full_keys": 0, "num_scored": 0}

    def switch(self, *, has_policy):
        self.has_policy = has_policy

    def decode(self, token_ids, num_new_tokens):
        self.decoded.append((self.has_policy, len(token_ids), num_new_tokens))
        return Decoded(
            token_ids=[1],
            prefill_seconds=1.0,
            decode_seconds=0.0,
            num_first_tokens=1,
            num_steps=0,
            pool_blocks_prefilled=None,
            pool_blocks_last=None,
        )


@pytest.fixture
def measure(monkeypatch):
    pytest.importorskip("torch")
    from torch_bridge import prompts
    from torch_bridge.huggingface import identity

    monkeypatch.setenv("VLLM_DIST_IDENT", "")  # removed at the end
    monkeypatch.delenv("VLLM_DIST_IDENT")
    monkeypatch.setattr(measured, "MeasuredEngine", FakeEngine)
    monkeypatch.setattr(identity, "weights_name", lambda model: "none")
    monkeypatch.setattr(
        prompts,
        "build_prompt",
        lambda _, context_tokens: SimpleNamespace(token_ids=[0] * context_tokens),
    )
    return lambda budget, **options: measured.measure(
        VllmRunOptions(
            engine="vllm-attend",
            context_tokens=640,
            num_new_tokens=50,
            budget=parse_budget(budget),
            **options,
        )
    )


@pytest.mark.parametrize(
    ("budget", "num_tokens"), [("2b", 128), ("4b", 192), ("25%", 224), ("19b", 640), ("100%", 640)]
)
def test_a_warm_up_exceeds_the_budget_with_the_policy_and_without(measure, budget, num_tokens):
    """Up to its budget, a request attends to everything: that warms no selection."""
    assert measure(budget)["pool_blocks"] == {"prefilled": None, "last": None}
    assert FakeEngine.newest.decoded == [
        (True, num_tokens, 12),
        (False, num_tokens, 12),
        (False, 640, 50),
        (True, 640, 50),
    ]


def test_stock_attention_is_not_warmed_where_it_is_not_measured(measure):
    measure("4b", compare_full=False)
    assert FakeEngine.newest.decoded == [(True, 192, 12), (True, 640, 50)]


def test_MON_1_a_report_says_under_which_variables_and_threads(measure, monkeypatch):
    """MON-1: what a caller's environment changes leaves a trace; secrets leave none."""
    import torch

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    monkeypatch.setenv("VLLM_API_KEY", "a secret")
    found = measure("4b")["environment"]
    assert found["num_threads"] == torch.get_num_threads()
    assert found["variables"]["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert found["variables"]["VLLM_API_KEY"] == "(set)"
    assert {"PATH", "VLLM_DIST_IDENT"}.isdisjoint(found["variables"])
