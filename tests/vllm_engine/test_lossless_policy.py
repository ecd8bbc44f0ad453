"""Self-speculation in a real engine: stock vLLM's output, from drafts over selected blocks."""

import collections

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; pip install 'blockcompact-jax[vllm]'")

import engines
import torch
from attend_policy.packed import attend
from engines import B, read_tokens
from lossless_tests import MAX_TOKENS, LosslessTests

EVERY, BUDGET, LAYERS, NUM_DRAFTS = 8, 3, 3, 4
NUM_BLOCKS, NUM_SAMPLES = 40, 400
COMPACTION = {"policy": "lossless", "budget": f"{BUDGET}b", "reselect_every_tokens": EVERY}
OPTIONS = {
    "num_gpu_blocks_override": NUM_BLOCKS,
    "max_num_batched_tokens": 128,
    "max_model_len": MAX_TOKENS,
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    model = engines.save_llama(tmp_path_factory.mktemp("llama"))
    with engines.engine(model, backend=engines.STOCK, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm(stock):
    model = stock.llm_engine.model_config.model
    with engines.engine(
        model,
        compaction=COMPACTION,
        speculative_config=engines.self_speculation(NUM_DRAFTS),
        **OPTIONS,
    ) as llm:
        yield llm


@pytest.fixture
def counted(llm):
    yield from engines.counting(llm, NUM_BLOCKS)


def test_greedy_tokens_are_stocks_in_mixed_batches_with_chunked_prompts(stock, llm, counted):
    prompts = [engines.prompt(n) for n in (31, 200, 127, 1, 160)]
    assert engines.generate(llm, prompts, 70) == engines.generate(stock, prompts, 70)
    found = counted()
    assert 0 < found["num_accepted"] < found["num_verified"]
    assert found["num_keys"] < found["num_full_keys"]


class TestAnyModel(LosslessTests):
    num_new_until_full = 60


def test_requests_come_and_go_between_rounds(stock, llm, counted):
    """A draft of one request never meets another's: aborts, ends and newcomers reorder the rows."""
    prompts = [engines.prompt(n, seed=5) for n in (140, 190, 165, 40)]
    lengths = (15, 60, 40, 50)
    expected = [engines.generate(stock, [p], n)[0] for p, n in zip(prompts, lengths, strict=True)]
    aborted = engines.add(llm, engines.prompt(220, seed=1), 60)
    names = [engines.add(llm, p, n) for p, n in zip(prompts[:2], lengths, strict=False)]
    tokens = {}

    def step(times):
        for _ in range(times):
            for output in llm.llm_engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)

    step(9)
    llm.llm_engine.abort_request([aborted])
    names.append(engines.add(llm, prompts[2], lengths[2]))
    step(5)
    names.append(engines.add(llm, prompts[3], lengths[3]))
    tokens |= engines.finish(llm)
    assert [tokens[name] for name in names] == expected
    assert counted()["num_verified"]


def test_drafts_that_attend_to_everything_are_all_accepted(llm, counted, monkeypatch):
    """The draft's forward is then the verification's, token by token, over block boundaries."""
    from torch_bridge.selector import Selector
    from torch_bridge.vllm.config import parse_config

    (builder,) = engines.builders_of(llm)
    whole = builder.make_compaction(parse_config({"blockcompact": COMPACTION | {"budget": "100%"}}))
    monkeypatch.setattr(Selector, "needs_all", lambda *_: False)
    monkeypatch.setattr(builder, "compaction", whole, raising=False)
    engines.generate(llm, [engines.prompt(n) for n in (140, 95, 200)], 70)
    assert whole.counts.num_accepted == whole.counts.num_verified > 150
    assert whole.counts.num_keys == whole.counts.num_full_keys


class Watch:
    """Checks each token of every draft forward against float64 over the promised tokens."""

    def __init__(self, llm, monkeypatch):
        from torch_bridge.vllm.backend import BlockCompactAttentionImpl

        self.drafting = engines.compaction_of(llm)
        (self.layout,) = [builder.isa for builder in engines.builders_of(llm)]
        self.num_checked, self.largest_change = 0, 0.0
        draft_tables, draft_step = self.drafting.draft_tables, self.drafting.draft_step
        forward = BlockCompactAttentionImpl.forward

        def tables(places, num_tokens, **kwargs):
            self.places = places
            return draft_tables(places, num_tokens, **kwargs)

        def step(draft, rows, num_tokens):
            self.lengths = {
                self.places[row]: int(n) for row, n in zip(rows, num_tokens, strict=True)
            }
            self.block_table = {self.places[row]: draft.block_table[row] for row in rows}
            self.step = draft_step(draft, rows, num_tokens)
            return self.step

        def watched(impl, layer, query, *args, output, **kwargs):
            result = forward(impl, layer, query, *args, output=output, **kwargs)
            *_, kv_cache, metadata = args
            if getattr(metadata, "step", None) is not None and metadata.step is self.step:
                queries = query.view(-1, impl.num_heads, impl.head_size)
                outputs = output.view(queries.shape).double()
                row = int(layer.layer_name.split(".")[2])
                self.check(row, queries, outputs, kv_cache, metadata, scale=impl.scale)
            return result

        self.step = None
        monkeypatch.setattr(self.drafting, "draft_tables", tables, raising=False)
        monkeypatch.setattr(self.drafting, "draft_step", step, raising=False)
        monkeypatch.setattr(BlockCompactAttentionImpl, "forward", watched)

    def check(self, row, queries, outputs, kv_cache, metadata, *, scale):
        ends = metadata.query_start_loc[1:].tolist()
        begins = metadata.query_start_loc[:-1].tolist()
        for (place, length), begin, end in zip(self.lengths.items(), begins, ends, strict=True):
            request = self.drafting._rows[place]
            chosen = set(request.selected[row].tolist())
            assert len(chosen) == BUDGET - 1
            tail = request.num_candidate_blocks * B
            for token in range(begin, end):
                everything = range(length - (end - token) + 1)
                promised = [t for t in everything if t // B in chosen or t >= tail]
                blocks = self.block_table[place]
                kv = read_tokens(kv_cache, self.layout, blocks, promised)
                expected, _ = attend(queries[token], *kv, scale)
                torch.testing.assert_close(outputs[token], expected, atol=1e-4, rtol=1e-4)
                kv = read_tokens(kv_cache, self.layout, blocks, everything)
                change = (attend(queries[token], *kv, scale)[0] - outputs[token]).abs().max()
                self.largest_change = max(self.largest_change, float(change))
                self.num_checked += 1


def test_drafts_attend_to_the_selection_the_tail_and_earlier_drafts(llm, counted, monkeypatch):
    watch = Watch(llm, monkeypatch)
    engines.generate(llm, [engines.prompt(n) for n in (150, 33, 187)], 20)
    assert watch.num_checked > 3 * LAYERS * NUM_DRAFTS
    assert watch.largest_change > 1e-3, "a small budget must change attention"


def sampled(llm, seed):
    """{position: how often each token} of short continuations of one prompt."""
    from vllm import SamplingParams

    torch.manual_seed(seed)  # what requests without a seed draw from
    counts = collections.defaultdict(collections.Counter)
    for sample in range(NUM_SAMPLES):
        params = SamplingParams(
            temperature=1.0,
            top_p=0.8,  # top-k alone fails in vLLM's sampler where no row has drafts
            max_tokens=5,
            ignore_eos=True,
            detokenize=False,
        )
        prompt = {"prompt_token_ids": engines.prompt(4 * B)}
        llm.llm_engine.add_request(f"sample-{seed}-{sample}", prompt, params)
    for tokens in engines.finish(llm).values():
        for position, token in enumerate(tokens):
            counts[position][token] += 1
    return counts


def distance(ours, theirs):
    """Chi-square of two histograms of equally many samples, in standard deviations of chance."""
    common = [t for t in {*ours, *theirs} if ours[t] + theirs[t] >= 10]
    rest = [sum(count for t, count in side.items() if t not in common) for side in (ours, theirs)]
    pairs = [(ours[t], theirs[t]) for t in common] + ([tuple(rest)] if sum(rest) else [])
    square = sum((a - b) ** 2 / (a + b) for a, b in pairs)
    freedom = max(len(pairs) - 1, 1)
    return (square - freedom) / (2 * freedom) ** 0.5


def test_values_of_requests_are_written_for_each_of_their_tokens():
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    from torch_bridge.vllm import sampler_kernels

    sampler_kernels.register()
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    for dtype in (torch.float32, torch.int32):
        values = torch.tensor([0.5, 4.0, 0.0], dtype=torch.float64).mul(10).to(dtype)
        found = expand_batch_to_tokens(values, ends, 5, replace_from=0, replace_to=1)
        assert found.dtype == dtype
        assert found.tolist() == [5, 5, 1, 1, 1]


def test_sampled_tokens_are_distributed_as_stocks(stock, llm, counted):
    ours, theirs = sampled(llm, 1), sampled(stock, 2)
    found = counted()
    assert 0 < found["num_accepted"] < found["num_verified"]
    distances = [distance(ours[position], theirs[position]) for position in range(5)]
    assert max(distances) < 4, distances
    best = collections.Counter({max(theirs[3], key=theirs[3].get): NUM_SAMPLES})
    assert distance(best, theirs[3]) > 10, "a sampler that takes every draft would be seen"
