"""Self-speculation of a model with sliding-window layers: stock vLLM's output."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; pip install 'blockcompact-jax[vllm]'")

import engines
from lossless_tests import MAX_TOKENS, LosslessTests

NUM_DRAFTS, NUM_BLOCKS = 4, 44
COMPACTION = {"policy": "lossless", "budget": "3b", "reselect_every_tokens": 8}
OPTIONS = {
    "num_gpu_blocks_override": NUM_BLOCKS,
    "max_num_batched_tokens": 128,
    "max_model_len": MAX_TOKENS,
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    model = engines.save_gemma(tmp_path_factory.mktemp("gemma"))
    with engines.engine(model, backend=engines.STOCK, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm(stock):
    with engines.engine(
        stock.llm_engine.model_config.model,
        compaction=COMPACTION,
        speculative_config=engines.self_speculation(NUM_DRAFTS),
        **OPTIONS,
    ) as llm:
        kinds = [type(builder.kv_cache_spec).__name__ for builder in engines.builders_of(llm)]
        assert sorted(kinds) == ["LookaheadAttentionSpec", "LookaheadWindowSpec"]
        yield llm


@pytest.fixture
def counted(llm):
    yield from engines.counting(llm, NUM_BLOCKS)


def test_greedy_tokens_are_stocks_in_mixed_batches_with_chunked_prompts(stock, llm, counted):
    prompts = [engines.prompt(n) for n in (31, 200, 47, 1, 160)]  # the window has 48 tokens
    assert engines.generate(llm, prompts, 70) == engines.generate(stock, prompts, 70)
    found = counted()
    assert 0 < found["num_accepted"] < found["num_verified"]
    assert found["num_keys"] < found["num_full_keys"]


class TestAnyModel(LosslessTests):
    num_new_until_full = 90


def test_drafts_that_attend_to_everything_are_all_accepted(llm, counted, monkeypatch):
    """The draft's forward is then the verification's, in the windows too."""
    from torch_bridge.selector import Selector
    from torch_bridge.vllm.config import parse_config

    (builder,) = [b for b in engines.builders_of(llm) if b.compaction is not None]
    whole = builder.make_compaction(parse_config({"blockcompact": COMPACTION | {"budget": "100%"}}))
    monkeypatch.setattr(Selector, "needs_all", lambda *_: False)
    monkeypatch.setattr(builder, "compaction", whole, raising=False)
    engines.generate(llm, [engines.prompt(n) for n in (140, 45, 200)], 70)
    assert whole.counts.num_accepted == whole.counts.num_verified > 150
    assert whole.counts.num_keys == whole.counts.num_full_keys
