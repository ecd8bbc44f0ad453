"""The retain policy in a real engine: vLLM's own allocator has the blocks back."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; pip install 'blockcompact-jax[vllm]'")

import engines
from engines import B

PROMPT_BLOCKS, NUM_WHOLE_REQUESTS, NUM_NEW = 60, 8, 40
NUM_BLOCKS = 1 + NUM_WHOLE_REQUESTS * (PROMPT_BLOCKS + 1)  # the null block, and whole requests


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    model = engines.save_llama(tmp_path_factory.mktemp("llama"), max_positions=2048)
    compaction = {"policy": "retain", "budget": "25%", "reselect_every_tokens": 4}
    with engines.engine(
        model,
        compaction=compaction,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_num_seqs=32,
        max_model_len=2048,
        max_num_batched_tokens=2048,
    ) as llm:
        yield llm


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def pool_of(llm):
    return scheduler_of(llm).kv_cache_manager.block_pool


def most_running(llm, num_requests, num_new):
    """(most requests that decode at once, tokens of each) of requests that all wait at first."""
    names = [
        engines.add(llm, engines.prompt(PROMPT_BLOCKS * B - 5, seed=seed), num_new)
        for seed in range(num_requests)
    ]
    most, tokens = 0, {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        running = scheduler_of(llm).running
        most = max(most, sum(request.num_output_tokens > 2 for request in running))
    return most, [tokens[name] for name in names]


def test_OWN_4_blocks_are_counted_free_by_vllm_itself(llm):
    """OWN-1, OWN-4: while the request decodes, and all of them after it, none twice."""
    pool = pool_of(llm)
    num_free = pool.get_num_free_blocks()
    engines.add(llm, engines.prompt(PROMPT_BLOCKS * B - 5), 20)
    held = []
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        held.append(num_free - pool.get_num_free_blocks())
    assert held[0] == PROMPT_BLOCKS
    assert min(held[:-1]) == 16, "a quarter of 59 whole blocks, rounded up, and the partial one"
    assert held[-1] == 0
    assert all(block.ref_cnt == 0 or block.is_null for block in pool.blocks), (
        "every block but the null block is free"
    )


def test_at_a_quarter_three_times_as_many_long_requests_decode_at_once(llm):
    most, tokens = most_running(llm, 3 * NUM_WHOLE_REQUESTS + 2, NUM_NEW)
    assert pool_of(llm).get_num_free_blocks() == NUM_BLOCKS - 1
    assert [len(row) for row in tokens] == [NUM_NEW] * len(tokens)
    assert most >= 3 * NUM_WHOLE_REQUESTS


def test_a_request_in_given_back_blocks_decodes_as_it_does_alone(llm):
    prompts = [engines.prompt(num_blocks * B - 5, seed=9) for num_blocks in (12, 60, 30, 31, 59)]
    together = engines.generate(llm, prompts, 30)
    for place in (0, 4):
        assert together[place] == engines.generate(llm, [prompts[place]], 30)[0]


def test_sliding_window_groups_beside_it_are_left_alone(tmp_path):
    compaction = {"policy": "retain", "budget": "25%", "reselect_every_tokens": 4}
    model = engines.save_gemma(tmp_path)
    with engines.engine(model, compaction=compaction) as llm:
        kinds = {type(builder.kv_cache_spec).__name__ for builder in engines.builders_of(llm)}
        assert kinds == {"RetainedAttentionSpec", "SlidingWindowSpec"}
        pool = pool_of(llm)
        num_free = pool.get_num_free_blocks()
        prompts = [engines.prompt(12 * B - 5, seed=seed) for seed in range(3)]
        names = [engines.add(llm, token_ids, 20) for token_ids in prompts]
        held = []
        tokens = {}
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            held.append(num_free - pool.get_num_free_blocks())
        assert max(held) >= 3 * 12
        assert min(held[:-1]) <= max(held) - 3 * 7, "12 blocks came down to 5 in the full group"
        assert held[-1] == 0
        assert tokens[names[2]] == engines.generate(llm, [prompts[2]], 20)[0]
