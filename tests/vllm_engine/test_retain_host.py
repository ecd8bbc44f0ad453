"""The retain policy with host memory in a real engine: blocks come back into vLLM's own."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; pip install 'blockcompact-jax[vllm]'")

import engines
import torch
from engines import B

LAYERS, PROMPT_BLOCKS, NUM_BLOCKS, NUM_NEW = 3, 20, 48, 60
COMPACTION = {
    "policy": "retain",
    "budget": "25%",
    "reselect_every_tokens": 1,  # so that no request waits for others
    "host_bytes": 2**24,
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    model = engines.save_llama(tmp_path_factory.mktemp("llama"), max_positions=2048)
    with engines.engine(
        model,
        compaction=COMPACTION,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_num_batched_tokens=256,
        max_model_len=1024,
    ) as llm:
        yield llm


@pytest.fixture
def host(llm):
    """Of the engine; after a test, it and vLLM's pool have all blocks back."""
    host = engines.compaction_of(llm).host
    yield host
    assert host.num_free == host.max_blocks
    pool = engines.scheduler_of(llm).kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1
    assert all(block.ref_cnt == 0 or block.is_null for block in pool.blocks)


class WholeBlocks:
    """Keeps the bytes of a lone request's prompt as they were when all were there, and checks that
    every later step of it reads the same bytes, wherever they lie by then."""

    def __init__(self, llm, monkeypatch):
        from torch_bridge.vllm.backend import BlockCompactAttentionImpl

        self.num_checked, self.num_keys = 0, []
        self._kept = {}  # by layer: [block, ...] of the whole prompt
        self._llm = llm
        forward = BlockCompactAttentionImpl.forward

        def watched(impl, layer, *args, **kwargs):
            result = forward(impl, layer, *args, **kwargs)
            *_, kv_cache, metadata = args[:5]
            step = getattr(metadata, "step", None)
            if step is not None:
                self._check(layer.layer_name, kv_cache, step)
            return result

        monkeypatch.setattr(BlockCompactAttentionImpl, "forward", watched)

    def _check(self, layer_name, kv_cache, step):
        table = step.block_table_by_layer_name[layer_name][0]
        request = engines.compaction_of(self._llm)._tracker._by_first_block[int(table[0])]
        if request.selected is None:
            self._kept[layer_name] = kv_cache[table[:PROMPT_BLOCKS].tolist()].clone()
            return
        whole = self._kept[layer_name]
        blocks = [*request.selected[0], *range(request.num_candidate_blocks, PROMPT_BLOCKS)]
        for physical_block, block in zip(table.tolist(), blocks, strict=False):
            assert torch.equal(kv_cache[physical_block], whole[block])
            self.num_checked += 1


def test_UPL_6_what_comes_back_is_what_was_given_back(llm, host, monkeypatch):
    """UPL-6, OWN-1, OWN-4: byte for byte, in blocks that vLLM's own allocator gave."""
    watch = WholeBlocks(llm, monkeypatch)
    pool = engines.scheduler_of(llm).kv_cache_manager.block_pool
    before, num_free, held = host.num_uploaded, pool.get_num_free_blocks(), []
    engines.add(llm, engines.prompt(PROMPT_BLOCKS * B), NUM_NEW)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        held.append(num_free - pool.get_num_free_blocks())
    assert host.num_uploaded - before > 3
    assert watch.num_checked > 5 * LAYERS * NUM_NEW // 2
    assert max(held[5:]) <= 9, "a quarter of 21 whole blocks, and what came since"


def test_requests_that_share_the_engine_decode_as_they_do_alone(llm, host):
    prompts = [engines.prompt(n, seed=4) for n in (500, 300, 420)]
    before = host.num_uploaded
    together = engines.generate(llm, prompts, 40)
    assert host.num_uploaded - before > 3
    for token_ids, tokens in zip(prompts, together, strict=True):
        assert engines.generate(llm, [token_ids], 40)[0] == tokens


def test_preempted_requests_are_computed_anew_and_finish(llm, host, monkeypatch):
    """OWN-1: preemption frees what they had, on the host too."""
    scheduler, hosted = engines.scheduler_of(llm), []
    preempt = scheduler._preempt_request

    def remember(request, *args, **kwargs):
        hosted.append(host.max_blocks - host.num_free)
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", remember)
    prompts = [engines.prompt(length, seed=length) for length in (300, 310, 320, 330, 340, 350)]
    tokens = engines.generate(llm, prompts, 500)
    assert [len(row) for row in tokens] == [500] * len(prompts)
    assert any(hosted), "nothing was preempted that had blocks on the host"


def test_what_the_host_has_no_room_for_is_gone(tmp_path):
    block_bytes = LAYERS * 2 * B * 2 * 32 * 4
    model = engines.save_llama(tmp_path)
    with engines.engine(model, compaction=COMPACTION | {"host_bytes": 5 * block_bytes}) as llm:
        host = engines.compaction_of(llm).host
        assert host.max_blocks == 5
        (tokens,) = engines.generate(llm, [engines.prompt(400)], 30)
        assert len(tokens) == 30
        assert host.num_lost > 0
        assert host.num_free == host.max_blocks
