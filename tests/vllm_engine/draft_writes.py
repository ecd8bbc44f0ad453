"""Checks which bytes of an engine's KV tensors its drafts write."""

import collections

import engines
from attend_policy.packed import packed_places
from engines import B


class DraftWrites:
    """Watches a proposer: drafts write behind their request's confirmed tokens, nowhere else.

    Attributes:
        num_written: tokens whose KV changed, over layers.
        num_crossed: drafts that reached into a block that held nothing confirmed.
    """

    def __init__(self, llm, monkeypatch):
        self.num_written = self.num_crossed = 0
        self._runner = engines.runner_of(llm)
        scheduler = engines.scheduler_of(llm)
        # Groups share the physical blocks and the tensors, never a block at a time.
        self._managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        (builder, *_) = engines.builders_of(llm)
        self._places = packed_places(builder.isa, B, builder.head_dim, is_16_bit=False)
        propose = self._runner.drafter.propose

        def watched(sampled, num_tokens, token_ids, **kwargs):
            before = [kv.clone() for kv in self._runner.kv_caches]
            drafts = propose(sampled, num_tokens, token_ids, **kwargs)
            allowed = self._allowed(drafts, num_tokens)
            for old, kv in zip(before, self._runner.kv_caches, strict=True):
                self._check(old, kv, allowed)
            return drafts

        monkeypatch.setattr(self._runner.drafter, "propose", watched, raising=False)

    def _allowed(self, drafts, num_tokens):
        """{physical block: places in it}."""
        allowed = collections.defaultdict(set)
        for place, drafted in enumerate(drafts):
            first = int(num_tokens[place]) - 1
            self.num_crossed += first // B != (first + len(drafted) - 1) // B and len(drafted) > 0
            for manager in self._managers:
                blocks = manager.req_to_blocks[self._runner.input_batch.req_ids[place]]
                for position in range(first, first + len(drafted)):
                    block = blocks[position // B]
                    assert not block.is_null
                    allowed[block.block_id].add(position % B)
        return allowed

    def _check(self, old, kv, allowed):
        key, value = self._places
        is_changed = (old != kv).reshape(kv.shape[0], kv.shape[1], -1).any(1)
        for block in is_changed.any(1).nonzero().flatten().tolist():
            changed = is_changed[block]
            tokens = {t for t in range(B) if changed[key[t]].any() or changed[value[t]].any()}
            assert tokens <= allowed[block]
            self.num_written += len(tokens)
