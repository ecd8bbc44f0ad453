"""Stock vLLM against our backend with a budget of everything: the same tokens."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; pip install 'blockcompact-jax[vllm]'")

import engines
from engines import B

LENGTHS = [B - 1, B, B + 1, 70, 1, 150, 160, 170]
NUM_NEW = 40
# Few enough blocks that the requests do not fit as they grow: vLLM preempts some of them.
NUM_BLOCKS = {engines.save_llama: 17, engines.save_gemma: 25}


def run(model, num_blocks, monkeypatch, **options):
    """(tokens of requests alone, of all at once, number of preemptions)."""
    with engines.engine(
        model, num_gpu_blocks_override=num_blocks, max_num_batched_tokens=64, **options
    ) as llm:
        builders = engines.builders_of(llm)
        if "backend" in options:
            assert not any(hasattr(builder, "compaction") for builder in builders)
        else:
            by_kind = {
                type(builder.kv_cache_spec).__name__: builder.compaction is not None
                for builder in builders
            }
            assert by_kind.pop("FullAttentionSpec") is True
            assert not any(by_kind.values()), "sliding-window groups are left alone"
        preempted = engines.record_preemptions(llm, monkeypatch)
        prompts = [engines.prompt(length) for length in LENGTHS]
        alone = [engines.generate(llm, [token_ids], NUM_NEW)[0] for token_ids in prompts[:4]]
        together = engines.generate(llm, prompts, NUM_NEW)
        if "backend" not in options:
            counts = engines.compaction_of(llm).counts
            assert counts.num_keys == counts.num_full_keys > 0
    return alone, together, len(preempted)


@pytest.mark.parametrize("save", [engines.save_llama, engines.save_gemma], ids=["llama", "gemma"])
def test_a_budget_of_everything_gives_the_tokens_of_stock_vllm(save, tmp_path, monkeypatch):
    model = save(tmp_path)
    stock = run(model, NUM_BLOCKS[save], monkeypatch, backend=engines.STOCK)
    ours = run(model, NUM_BLOCKS[save], monkeypatch, compaction={"budget": "100%"})
    assert ours == stock
    assert len(stock[0][0]) == NUM_NEW
    assert stock[2] > 0, "nothing was preempted; give the engine fewer blocks"


@pytest.mark.slow
def test_a_compiled_model_gives_the_tokens_of_an_eager_one(tmp_path):
    """On a small budget: attention stays outside the compiled graphs."""
    model = engines.save_llama(tmp_path)
    runs = []
    for enforce_eager in (True, False):
        with engines.engine(
            model,
            compaction={"budget": "3b", "reselect_every_tokens": 4},
            enforce_eager=enforce_eager,
        ) as llm:
            tokens = engines.generate(llm, [engines.prompt(n) for n in (31, 150, 97, 200)], 24)
            runs.append((tokens, vars(engines.compaction_of(llm).counts)))
    assert runs[0] == runs[1]
    assert runs[0][1]["num_keys"] < runs[0][1]["num_full_keys"]
