"""The retain policy in a real engine: vLLM's own allocator has the blocks back."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; pip install 'blockcompact-jax[vllm]'")

import engines
import numpy as np
from engines import B

from torch_bridge.vllm import retain
from torch_bridge.vllm.requests import DecodingRequest

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


@pytest.fixture(scope="module")
def small_llm(llm):
    """A second engine in the process, with chunked prefill and few blocks."""
    compaction = {"policy": "retain", "budget": "60%", "reselect_every_tokens": 4}
    with engines.engine(
        llm.llm_engine.model_config.model,
        compaction=compaction,
        num_gpu_blocks_override=36,
        max_model_len=1024,
        max_num_batched_tokens=256,
    ) as small:
        yield small


def pool_of(llm):
    return engines.scheduler_of(llm).kv_cache_manager.block_pool


def manager_of(llm):
    (manager,) = engines.scheduler_of(llm).kv_cache_manager.coordinator.single_type_managers
    return manager


def assert_nothing_is_left(llm):
    pool = pool_of(llm)
    assert pool.get_num_free_blocks() == len(pool.blocks) - 1
    retained = retain.retained_of(manager_of(llm).kv_cache_spec.engine)
    assert all(retained.find(block.block_id) is None for block in pool.blocks)


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
        running = engines.scheduler_of(llm).running
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


def test_preempted_requests_are_computed_anew_and_finish(small_llm, monkeypatch):
    """OWN-1, OWN-4: preemption frees what a request still had, once."""
    scheduler, held = engines.scheduler_of(small_llm), []
    preempt = scheduler._preempt_request

    def remember(request, *args, **kwargs):
        held.append(list(manager_of(small_llm).req_to_blocks[request.request_id]))
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", remember)
    lengths = (300, 310, 320, 330, 200)
    prompts = [engines.prompt(length, seed=seed) for seed, length in enumerate(lengths)]
    tokens = engines.generate(small_llm, prompts, 300)
    assert [len(row) for row in tokens] == [300] * len(lengths)
    assert any(block.is_null for blocks in held for block in blocks), (
        "no request that had given blocks back was preempted; give the engine fewer blocks"
    )
    assert_nothing_is_left(small_llm)


def test_a_session_that_goes_on_attends_to_what_it_still_has(small_llm, monkeypatch):
    """OWN-1: streaming input, a second prompt after the first was answered."""
    from vllm import SamplingParams

    core = small_llm.llm_engine.engine_core.engine_core
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)

    def feed(token_ids):
        request, wave = core.preprocess_add_request(
            small_llm.llm_engine.input_processor.process_inputs(
                "session",
                {"prompt_token_ids": token_ids},
                params,
                supported_tasks=("generate",),
                resumable=True,
            )
        )
        request.request_id = "session"
        core.add_request(request, wave)

        session = engines.scheduler_of(small_llm).requests["session"]
        core.step()
        while session.status.name != "WAITING_FOR_STREAMING_REQ":
            core.step()

    feed(engines.prompt(600, seed=1))
    num_gone = sum(block.is_null for block in manager_of(small_llm).req_to_blocks["session"])
    assert num_gone >= 6

    seen, decoding = [], []
    compaction = engines.compaction_of(small_llm)
    begin_step = compaction.begin_step

    def remember(table, num_tokens, is_decoding):
        step = begin_step(table, num_tokens, is_decoding)
        tables = step.tables  # its table is written anew in the next step
        seen.append((int(num_tokens[0]), int(tables.num_keys[0]), tables.block_table[:, 0].copy()))
        decoding.append(bool(is_decoding[0]))
        return step

    monkeypatch.setattr(compaction, "begin_step", remember)
    feed(engines.prompt(300, seed=2))  # in two chunks
    core.abort_requests(["session"])
    assert decoding == [False] * 2 + [True] * 11
    for num_tokens, num_keys, table in seen:
        assert num_keys <= num_tokens - num_gone * B
        assert np.all(table[:, : -(-num_keys // B)] > 0), "no null block"
    assert_nothing_is_left(small_llm)


def test_engines_of_one_process_do_not_hear_of_each_others_requests(llm, small_llm):
    """Physical blocks have the same numbers in both."""
    (alone,) = engines.generate(small_llm, [engines.prompt(620, seed=2)], 12)
    name = engines.add(small_llm, engines.prompt(620, seed=2), 12)
    small_llm.llm_engine.step()
    (blocks,) = manager_of(small_llm).req_to_blocks.values()
    others = retain.retained_of(manager_of(llm).kv_cache_spec.engine)
    first = blocks[0].block_id
    others.add(
        DecodingRequest(
            physical_blocks=np.arange(first, first + 4, dtype=np.int32),
            num_tokens=4 * B,
            selected=np.array([[0]], np.int32),
            num_candidate_blocks=3,
            is_retained=True,
        )
    )
    try:
        assert engines.finish(small_llm)[name] == alone
    finally:
        others.forget(first)


def test_sliding_window_groups_beside_it_are_left_alone(tmp_path):
    # Every token: when a request selects anew must not depend on the others beside it.
    compaction = {"policy": "retain", "budget": "25%", "reselect_every_tokens": 1}
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
