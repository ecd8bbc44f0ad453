"""A paged engine that plans with FlashInfer's arrays computes what one with vLLM's tables does."""

import pytest
import torch

from torch_bridge.engine_tables import (
    VllmTables,
    from_flashinfer,
    from_vllm,
    to_flashinfer,
    to_vllm,
)

from . import mini_engine as mini
from .mini_engine import token_values
from .packed import attend
from .test_attend_engine import make_engine


def drive(engine):
    """Requests join, decode, leave, and join again; yields the outputs of every step."""
    engine.admit(1, 40)
    engine.admit(2, 57)
    yield from (engine.step() for _ in range(6))
    engine.leave(1)
    engine.admit(3, 33)
    yield from (engine.step() for _ in range(6))


def flashinfer_attention(engine, layer, place, tables):
    """One request's attention through its pages alone."""
    indptr, indices, last = tables
    pages = indices[indptr[place] : indptr[place + 1]]
    num_keys = (len(pages) - 1) * mini.B + int(last[place])
    keys, values = engine.kv[layer].read(torch.from_numpy(pages), num_keys)
    query = token_values(engine.names[place], layer, int(engine.seq_lens[place]) - 1)[0]
    return attend(query, keys, values, mini.SCALE)[0].float()


@pytest.mark.parametrize("budget", ["100%", "3b"])
def test_pages_of_each_layers_table_give_the_engines_outputs(budget):
    engine, steps = make_engine(budget, every=4), []
    begin_step = engine.compaction.begin_step

    def noting_begin_step(*arguments):
        steps.append(begin_step(*arguments))
        return steps[-1]

    engine.compaction.begin_step = noting_begin_step
    num_compared = num_layer_tables = 0
    for outs in drive(engine):
        step, batch = steps[-1], len(engine.names)
        for layer in range(mini.LAYERS):
            if step is None:
                given = VllmTables(
                    engine.block_table[:batch].numpy(), engine.seq_lens[:batch].numpy()
                )
            else:
                given = VllmTables(step.tables.block_table[layer], step.tables.num_keys)
                num_layer_tables += 1
            ragged = from_vllm(given, block_tokens=mini.B)
            pages = to_flashinfer(ragged, given.seq_lens.tolist(), block_tokens=mini.B)
            back = to_vllm(*from_flashinfer(pages, block_tokens=mini.B), block_tokens=mini.B)
            assert back.seq_lens.tolist() == given.seq_lens.tolist()
            for place, name in enumerate(engine.names):
                if name not in outs or (step is not None and place in step.scored):
                    continue  # a prompt, or a row that is scored elsewhere over all its blocks
                found = flashinfer_attention(engine, layer, place, pages)
                assert torch.equal(found, outs[name][layer])
                num_compared += 1
    assert num_compared > 20
    assert (num_layer_tables > 10) == (budget == "3b")
