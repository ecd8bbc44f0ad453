"""A client process that opens a request with rank processes, names them, and sleeps."""

import json
import os
import runpy
import sys
import time
from pathlib import Path

from blockcompact_jax.budget import Budget
from blockcompact_jax.kernels import Layout
from blockcompact_jax.remote.client import RemoteClient
from torch_bridge.huggingface.policies import score_source
from torch_bridge.huggingface.remote import RemoteSession
from torch_bridge.huggingface.session import SessionLimits


def _main(url):
    tiny = runpy.run_path(str(Path(__file__).with_name("tiny.py")))
    session = RemoteSession(
        model=tiny["tiny_model"]("llama"),
        limits=SessionLimits(
            max_tokens=400,
            num_draft_tokens=3,
            num_lookup_tokens=2,
            reselect_every_rounds=2,
            block_tokens=32,
            budget=Budget(fraction=0.5),
        ),
        score_source=score_source("attention", seed=5),
        layout=Layout.AMX,
        client=RemoteClient(url, token=tiny["TOKEN"]),
        num_ranks=2,
    )
    session.prefill(list(range(90)))
    ranks = list(session.ranks.group.pids.values())
    print(json.dumps({"pid": os.getpid(), "ranks": ranks}), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    _main(*sys.argv[1:])
