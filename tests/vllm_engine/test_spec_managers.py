"""Specifications of ours bring their managers along, into whatever process vLLM sends them."""

import itertools
import pickle
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; pip install 'blockcompact-jax[vllm]'")

import torch

B, WINDOW, LOOKAHEAD, MAX_TOKENS = 32, 80, 4, 512

PROGRAM = """
import pickle, sys
specs = pickle.load(sys.stdin.buffer)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
for spec in specs:
    print(KVCacheSpecRegistry.get_manager_class(spec).__name__)
"""


@pytest.fixture(scope="module")
def specs():
    """{name of its manager: specification}, stock ones first."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from torch_bridge.vllm.lookahead import lookahead_spec
    from torch_bridge.vllm.retain import retained_spec

    shape = {"block_size": B, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    full, window = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=WINDOW)
    lookahead = {
        "num_lookahead_tokens": LOOKAHEAD,
        "max_tokens": MAX_TOKENS,
        "has_window_groups": True,
    }
    assert lookahead_spec(window, **lookahead | {"has_window_groups": False}) is window
    assert retained_spec(window, engine="one") is window
    return {
        "FullAttentionManager": full,
        "SlidingWindowManager": window,
        "RetainedAttentionManager": retained_spec(full, engine="one"),
        "LookaheadAttentionManager": lookahead_spec(full, **lookahead),
        "LookaheadWindowManager": lookahead_spec(window, **lookahead),
    }


def test_a_process_that_unpickles_a_specification_knows_its_manager(specs, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=pickle.dumps(list(specs.values())),
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        check=True,
    )
    assert done.stdout.decode().split()[-len(specs) :] == list(specs)


@pytest.mark.parametrize("kind", ["Retained", "Lookahead"])
def test_full_and_sliding_window_layers_get_groups_of_their_own(specs, kind):
    """In whatever order the model has them: vLLM asks the first layer's specification."""
    from vllm.v1.core.kv_cache_utils import is_kv_cache_spec_uniform

    full = specs[f"{kind}AttentionManager"]
    window = specs["LookaheadWindowManager" if kind == "Lookahead" else "SlidingWindowManager"]
    for layers in itertools.permutations([full, window, full]):
        assert not is_kv_cache_spec_uniform({str(i): spec for i, spec in enumerate(layers)})
    assert is_kv_cache_spec_uniform({"0": full, "1": full})
    assert type(full).merge([full, full]) == full


def test_a_window_with_drafts_holds_no_more_blocks_than_it_was_admitted_with(specs):
    """Of a request that fills the window in chunks and then drafts in every step."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec

    chunk = 100
    pool = BlockPool(num_gpu_blocks=32, enable_caching=False, hash_block_size=B)
    manager = get_manager_for_kv_cache_spec(
        specs["LookaheadWindowManager"],
        max_in_flight_tokens=chunk,
        max_model_len=MAX_TOKENS,
        block_pool=pool,
        enable_caching=False,
        kv_cache_group_id=0,
        scheduler_block_size=B,
    )
    most, num_free = manager.max_admission_blocks_per_request, pool.get_num_free_blocks()
    held, num_computed = [], 0
    steps = [chunk] * 3 + [1 + LOOKAHEAD] * 40
    for num_new in steps:
        num_tokens = min(num_computed + num_new, MAX_TOKENS)
        manager.remove_skipped_blocks("one", num_computed)
        arguments = {"new_computed_blocks": (), "total_computed_tokens": num_computed}
        num_blocks = manager.get_num_blocks_to_allocate(
            "one",
            num_tokens,
            num_local_computed_tokens=num_computed,
            num_tokens_main_model=num_tokens,
            **arguments,
        )
        assert len(manager.allocate_new_blocks("one", num_tokens, num_tokens)) == num_blocks
        blocks = manager.req_to_blocks["one"]
        assert len(blocks) * B >= min(num_tokens + LOOKAHEAD, MAX_TOKENS)
        assert len(blocks) * B <= MAX_TOKENS
        first_needed = max(num_computed - WINDOW + 1, 0) // B
        assert not any(block.is_null for block in blocks[first_needed:])
        held.append(num_free - pool.get_num_free_blocks())
        num_computed = min(num_computed + max(num_new - LOOKAHEAD // 2, 1), MAX_TOKENS - 1)
    assert max(held) <= most
    assert most < MAX_TOKENS // B
    manager.free("one")
    assert pool.get_num_free_blocks() == num_free
