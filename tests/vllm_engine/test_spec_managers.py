"""Specifications of ours bring their managers along, into whatever process vLLM sends them."""

import pickle
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; pip install 'blockcompact-jax[vllm]'")

import torch

PROGRAM = """
import pickle, sys
specs = pickle.load(sys.stdin.buffer)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
for spec in specs:
    print(KVCacheSpecRegistry.get_manager_class(spec).__name__)
"""


def test_a_process_that_unpickles_a_specification_knows_its_manager(tmp_path):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from torch_bridge.vllm.lookahead import lookahead_spec
    from torch_bridge.vllm.retain import retained_spec

    stock = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    specs = [
        stock,
        retained_spec(stock, engine="one"),
        lookahead_spec(stock, num_lookahead_tokens=4, max_tokens=512),
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=pickle.dumps(specs),
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        check=True,
    )
    assert done.stdout.decode().split()[-3:] == [
        "FullAttentionManager",
        "RetainedAttentionManager",
        "LookaheadAttentionManager",
    ]
