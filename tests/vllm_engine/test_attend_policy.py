"""The attend policy in a real engine: what its layers attend to, and what requests leave behind."""

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vllm is not installed; pip install 'blockcompact-jax[vllm]'")

import engines
import torch
from attend_policy.packed import attend, estimated_mass
from engines import B, read_tokens

EVERY = {"attention": 4, "estimate": 1}
BUDGET, LAYERS = 3, 3
MAX_BATCHED = 64


@pytest.fixture(scope="module", params=["attention", "estimate"])
def select_by(request):
    return request.param


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llm(tmp_path_factory, request, select_by):
    model = engines.save_llama(tmp_path_factory.mktemp("llama"))
    compaction = {
        "budget": f"{BUDGET}b",
        "select_by": select_by,
        "reselect_every_tokens": EVERY[select_by],
    }
    with engines.engine(
        model,
        compaction=compaction,
        dtype=request.param,
        num_gpu_blocks_override=17,
        max_num_batched_tokens=MAX_BATCHED,
    ) as llm:
        yield llm


class Watch:
    """Checks every decoding row of every layer against float64 over the promised tokens, and,
    where every token selects by an estimate, the selection."""

    def __init__(self, llm, monkeypatch, *, is_estimating):
        from torch_bridge.vllm.backend import BlockCompactAttentionImpl

        self.compaction, self.is_estimating = engines.compaction_of(llm), is_estimating
        (self.layout,) = [builder.isa for builder in engines.builders_of(llm)]
        self.num_checked = {"all": 0, "selected": 0}
        self.largest_change = 0.0
        tracker, forward = self.compaction._tracker, BlockCompactAttentionImpl.forward
        step_of = tracker.step

        def step(table, lengths, is_decoding):
            self.rows = step_of(table, lengths, is_decoding)
            self.is_decoding = is_decoding.copy()
            return self.rows

        def watched(impl, layer, query, *args, output, **kwargs):
            result = forward(impl, layer, query, *args, output=output, **kwargs)
            *_, kv_cache, metadata = args
            if metadata is not None:
                queries = query.view(-1, impl.num_heads, impl.head_size)
                outputs = output.view(queries.shape).double()
                row = int(layer.layer_name.split(".")[2])
                self.check(row, (queries, outputs), kv_cache, metadata, scale=impl.scale)
            return result

        monkeypatch.setattr(tracker, "step", step, raising=False)
        monkeypatch.setattr(BlockCompactAttentionImpl, "forward", watched)

    def check(self, row, queries_and_outputs, kv_cache, metadata, *, scale):
        for place, request in enumerate(self.rows):
            if request is None:
                continue
            everything = range(request.num_tokens)
            kind, tokens = "all", list(everything)
            if request.selected is not None:
                kind = "selected"
                chosen = set(request.selected[row].tolist())
                assert len(chosen) == BUDGET - 1
                tail = request.num_candidate_blocks * B
                tokens = [t for t in everything if t // B in chosen or t >= tail]
            token = int(metadata.query_start_loc[place])
            query, got = (rows[token] for rows in queries_and_outputs)
            blocks = request.physical_blocks
            kv = read_tokens(kv_cache, self.layout, blocks, tokens)
            expected, _ = attend(query, *kv, scale)
            tolerance = 1e-4 if query.dtype == torch.float32 else 3e-2
            torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
            if kind == "selected":
                kv = read_tokens(kv_cache, self.layout, blocks, everything)
                change = (attend(query, *kv, scale)[0] - got).abs().max()
                self.largest_change = max(self.largest_change, float(change))
                if self.is_estimating:
                    self.check_estimate(query, kv[0], request, request.selected[row], scale)
            self.num_checked[kind] += 1

    def check_estimate(self, query, keys, request, chosen, scale):
        candidates = request.num_candidate_blocks
        assert candidates == request.num_tokens // B - 1, "the query at hand selects"
        mass = estimated_mass(query, keys, candidates, B, scale).numpy()
        left = np.setdiff1d(np.arange(candidates), chosen)
        tolerance = 1e-4 if query.dtype == torch.float32 else 0.03
        assert mass[chosen[1:]].min() >= mass[left].max() * (1 - tolerance)


def test_layers_attend_to_the_selection_and_the_tail_in_mixed_batches(llm, monkeypatch, select_by):
    """SEL-2 where estimates select: every layer's own query chose what it attends to."""
    watch = Watch(llm, monkeypatch, is_estimating=select_by == "estimate")
    tokens = engines.generate(llm, [engines.prompt(n) for n in (31, 150, 97, 1, 33)], 18)
    assert [len(row) for row in tokens] == [18] * 5
    assert all(count > 0 for count in watch.num_checked.values()), watch.num_checked
    assert watch.largest_change > 1e-3, "a small budget must change attention"


def keys_of(num_prompt, num_new, select_by):
    """(keys attended to, of full attention, scorings) of a request alone."""
    keys = full = scored = tail = 0
    selected_at = None
    for length in range(num_prompt + 1, num_prompt + num_new):
        full += length
        whole = length // B
        if whole <= BUDGET:
            keys += length
            continue
        is_first = selected_at is None
        is_due = is_first or length - selected_at >= EVERY[select_by]
        if is_due and select_by == "estimate":
            tail, is_first = (whole - 1) * B, False
        keys += length if is_first else (BUDGET - 1) * B + length - tail
        if is_due:
            scored, selected_at, tail = scored + 1, length, (whole - 1) * B
    return keys, full, scored


@pytest.mark.parametrize("num_prompt", [20, 3 * B + 20, 6 * B - 1, 200])
def test_as_many_keys_are_attended_to_as_the_budget_says(llm, num_prompt, select_by):
    before = vars(engines.compaction_of(llm).counts).copy()
    engines.generate(llm, [engines.prompt(num_prompt)], 24)
    after = vars(engines.compaction_of(llm).counts)
    found = tuple(after[n] - before[n] for n in ("num_keys", "num_full_keys", "num_scored"))
    assert found == keys_of(num_prompt, 24, select_by)


def test_a_prompts_chunk_of_one_token_is_no_decoding_step(llm, monkeypatch):
    seen = []
    compaction = engines.compaction_of(llm)
    begin = compaction.begin_step

    def begin_step(table, lengths, is_decoding):
        seen.append((lengths.tolist(), is_decoding.tolist()))
        return begin(table, lengths, is_decoding)

    monkeypatch.setattr(compaction, "begin_step", begin_step, raising=False)
    engines.generate(llm, [engines.prompt(MAX_BATCHED + 1)], 3)
    assert seen == [
        ([MAX_BATCHED], [False]),
        ([MAX_BATCHED + 1], [False]),
        ([MAX_BATCHED + 2], [True]),
        ([MAX_BATCHED + 3], [True]),
    ]


def test_a_request_in_the_blocks_of_an_aborted_one_is_as_if_it_were_the_first(llm):
    second = engines.prompt(190, seed=2)
    (expected,) = engines.generate(llm, [second], 24)
    tracker = engines.compaction_of(llm)._tracker
    name = engines.add(llm, engines.prompt(220, seed=1), 60)
    for _ in range(20):
        llm.llm_engine.step()
    (aborted,) = tracker._by_first_block.values()
    assert aborted.selected is not None, "it was decoding on a selection"
    llm.llm_engine.abort_request([name])
    engines.add(llm, second, 24)
    llm.llm_engine.step()
    assert not tracker._by_first_block, "nothing of it is left"
    (tokens,) = engines.finish(llm).values()
    table = engines.runner_of(llm).input_batch.block_table[0].get_numpy_array()
    assert np.intersect1d(table[0, :6], aborted.physical_blocks).size, "blocks were not reused"
    assert tokens == expected


def test_preempted_requests_resume_and_finish(llm, monkeypatch):
    preempted = engines.record_preemptions(llm, monkeypatch)
    tokens = engines.generate(llm, [engines.prompt(140, seed=s) for s in range(4)], 60)
    assert preempted
    assert [len(row) for row in tokens] == [60] * 4
