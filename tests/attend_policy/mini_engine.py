"""A paged-attention engine of a few lines: persistent int32 tables, packed KV, many requests.

It knows nothing of compaction but what a vLLM backend is handed: tables, lengths, tensors. Its
"model" draws query, key and value of a token from (request name, layer, position) alone, so that a
request's KV does not depend on what it attends to.
"""

import functools

import numpy as np
import torch

from blockcompact_jax.geometry import ModelGeometry

from .packed import PackedKV, attend

LAYERS, HEADS, GROUP, DIMS, B = 2, 2, 2, 32, 8
MAX_REQUESTS, MAX_BLOCKS, NUM_BLOCKS = 4, 12, 40
SCALE = 0.35
LAYER_NAMES = [f"model.layers.{layer}.attn" for layer in range(LAYERS)]
GEOMETRY = ModelGeometry.uniform(
    num_layers=LAYERS,
    num_query_heads=HEADS * GROUP,
    num_kv_heads=HEADS,
    head_dim=DIMS,
    block_tokens=B,
    dtype="float32",
    layout="vec",
)
"""What a policy is told of the engine."""


@functools.cache
def token_values(name, layer, position):
    """(query [query heads, dims], key [heads, dims], value [heads, dims])."""
    generator = torch.Generator().manual_seed(hash((name, layer, position)) % 2**31)
    drawn = torch.randn((HEADS * GROUP + 2 * HEADS, DIMS), generator=generator)
    return drawn.split([HEADS * GROUP, HEADS, HEADS])


class MiniEngine:
    """Prefills a prompt in one step, decodes all others in the same step, condenses its rows.

    A running request may go on with several tokens at once, as the next prompt of a session.
    """

    def __init__(self, compaction, retained=None):
        self.compaction, self.retained = compaction, retained
        self.gone: dict[int, set[int]] = {}  # logical blocks that a request gave back
        self.came_back: dict[int, dict[int, int]] = {}  # physical blocks that no table names
        shape = {"num_blocks": NUM_BLOCKS, "heads": HEADS, "block_tokens": B, "dims": DIMS}
        self.kv = [PackedKV("vec", dtype=torch.float32, **shape) for _ in LAYER_NAMES]
        self.block_table = torch.full((MAX_REQUESTS, MAX_BLOCKS), -7, dtype=torch.int32)
        self.seq_lens = torch.zeros(MAX_REQUESTS, dtype=torch.int32)
        self.names: list[int] = []
        self.num_next: dict[int, int] = {}
        self.num_prompt: dict[int, int] = {}
        self.free = list(range(1, NUM_BLOCKS))

    def admit(self, name, num_prompt):
        self.names.append(name)
        self.num_prompt[name], self.gone[name], self.came_back[name] = num_prompt, set(), {}
        self.seq_lens[len(self.names) - 1] = 0

    def go_on(self, name, num_tokens):
        """The next step computes so many tokens of a request; its table comes anew."""
        self.num_next[name] = num_tokens
        place = self.names.index(name)
        self.block_table[place, list(self.gone[name])] = 0
        for logical, block in self.came_back[name].items():
            self.block_table[place, logical] = block

    def leave(self, name):
        """The last row moves into the hole, as in a persistent batch."""
        place, last = self.names.index(name), len(self.names) - 1
        blocks = self.block_table[place, : -(-int(self.seq_lens[place]) // B)].tolist()
        gone, came_back = self.gone.pop(name), self.came_back.pop(name)
        for logical, block in came_back.items():
            blocks[logical] = block
        self.free.extend(block for logical, block in enumerate(blocks) if logical not in gone)
        if self.retained is not None and blocks:
            self.retained.forget(blocks[0])
        self.block_table[place] = self.block_table[last]
        self.seq_lens[place] = self.seq_lens[last]
        self.names[place] = self.names[last]
        self.names.pop()
        del self.num_prompt[name]

    def step(self):
        """Runs one step; returns {name: [out of each layer]} of the newest token of requests that
        were prefilled before; [layer][token] of those that go on with several."""
        self._take_back()
        self._bring_back()
        queries, is_decoding = [], []
        for place, name in enumerate(self.names):
            before = int(self.seq_lens[place])
            is_decoding.append(before > 0 and name not in self.num_next)
            count = self.num_next.get(name, 1) if before else self.num_prompt[name]
            self._grow(place, before, before + count)
            queries.append(range(before, before + count))
        batch = len(self.names)
        first_query = torch.tensor(np.cumsum([0] + [len(rows) for rows in queries]))
        step = self.compaction.begin_step(
            self.block_table[:batch].numpy(),
            self.seq_lens[:batch].numpy(),
            np.array(is_decoding, bool),
        )
        is_known = [rows.start > 0 for rows in queries]
        outs = {name: [] for name, known in zip(self.names, is_known, strict=True) if known}
        for layer, layer_name in enumerate(LAYER_NAMES):
            query = torch.cat(
                [
                    self._write(layer, place, position)[None]
                    for place, positions in enumerate(queries)
                    for position in positions
                ]
            )
            facts = {"query": query, "first_query": first_query, "scale": SCALE}
            if step is not None:
                step.move(layer_name, self.kv[layer].tensor)
                step.select(layer_name, self.kv[layer].tensor, **facts)
            out = self._attend(layer, step, query, first_query, is_known)
            if step is not None and step.has_scored_rows:
                step.score(layer_name, self.kv[layer].tensor, **facts)
            for place, name in enumerate(self.names):
                if is_known[place]:
                    rows = out[int(first_query[place]) : int(first_query[place + 1])].clone()
                    outs[name].append(rows if name in self.num_next else rows[0])
        self.num_next.clear()
        return outs

    def _take_back(self):
        """What was given back is reused at once; tables keep naming it."""
        for place, name in enumerate(self.names):
            if self.retained is None or not self.seq_lens[place]:
                continue
            for logical in self.retained.dropped_blocks(int(self.block_table[place, 0])):
                if logical not in self.gone[name]:
                    self.gone[name].add(logical)
                    block = int(self.block_table[place, logical])
                    self.free.append(self.came_back[name].pop(logical, block))

    def _bring_back(self):
        """Empty blocks for what is awaited; tables keep naming what was there before."""
        for place, name in enumerate(self.names):
            if self.retained is None or not self.seq_lens[place]:
                continue
            first_block = int(self.block_table[place, 0])
            for logical in self.retained.awaited_blocks(first_block):
                self.gone[name].remove(logical)
                block = self.came_back[name][logical] = self._take()
                self.retained.come_back(first_block, logical, block)

    def _take(self):
        block = self.free.pop()
        for kv in self.kv:
            kv.clear(block)
        return block

    def _grow(self, place, before, after):
        for logical in range(-(-before // B), -(-after // B)):
            self.block_table[place, logical] = self._take()
        self.seq_lens[place] = after

    def _write(self, layer, place, position):
        query, key, value = token_values(self.names[place], layer, position)
        block = int(self.block_table[place, position // B])
        self.kv[layer].write(block, position % B, key, value)
        return query

    def _attend(self, layer, step, query, first_query, is_known):
        """The engine's own kernel: it follows the table it is given, and is causal from its end."""
        table, num_keys = self.block_table, self.seq_lens
        if step is not None:
            table = step.block_table_by_layer_name[LAYER_NAMES[layer]]
            num_keys = torch.from_numpy(step.tables.num_keys)
        out = torch.full_like(query, torch.nan)
        for place in range(len(self.names)):
            if not is_known[place]:
                continue
            tokens = range(int(first_query[place]), int(first_query[place + 1]))
            for keys, token in enumerate(tokens, int(num_keys[place]) - len(tokens) + 1):
                kv = self.kv[layer].read(table[place, : -(-keys // B)], keys)
                out[token] = attend(query[token], *kv, SCALE)[0].float()
        return out
