"""Gemma 3 270M in vLLM: weights that were trained, window and full-attention layers, real text."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; pip install 'blockcompact-jax[vllm]'")

import engines

from torch_bridge.models.cache import is_fetched, model_directory
from torch_bridge.prompts import build_prompt

NAME, NUM_NEW, NUM_DRAFTS = "gemma3-270m", 48, 6
LENGTHS = (1500, 700, 1100)  # three windows, and fewer
NEAR_TIE = 0.25
"""Logprobs this near one another are two steps of a bfloat16 logit of this model apart, at most."""

pytestmark = [
    pytest.mark.models,
    pytest.mark.slow,
    pytest.mark.skipif(
        not is_fetched(NAME),
        reason=f"{NAME} is not in the cache; `blockcompact models fetch {NAME}`",
    ),
]


@pytest.fixture(scope="module")
def prompts():
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_directory(NAME))
    return [build_prompt(tokenizer, context_tokens=length).token_ids for length in LENGTHS]


def outputs(prompts, dtype, **options):
    """([{token ID: logprob} of the best tokens, at each place] of each request, [tokens], counts).

    `counts` are those of our policy, None of stock vLLM.
    """
    from vllm import SamplingParams

    with engines.engine(
        model_directory(NAME),
        dtype=dtype,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        **options,
    ) as llm:
        params = SamplingParams(
            temperature=0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False, logprobs=5
        )
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        counts = None if "backend" in options else engines.compaction_of(llm).counts
    best = [
        [
            {token: entry.logprob for token, entry in place.items()}
            for place in out.outputs[0].logprobs
        ]
        for out in found
    ]
    return best, [list(out.outputs[0].token_ids) for out in found], counts


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def stock(request, prompts):
    """(dtype, best tokens, tokens) of stock vLLM."""
    best, tokens, _ = outputs(prompts, request.param, backend=engines.STOCK)
    return request.param, best, tokens


def first_difference(ours, theirs):
    """Place of the first token that differs; None where none does."""
    return next(
        (at for at, pair in enumerate(zip(ours, theirs, strict=True)) if len({*pair}) > 1), None
    )


@pytest.mark.parametrize("policy", ["attend", "retain"])
def test_a_budget_of_everything_gives_stocks_tokens(stock, prompts, policy):
    dtype, _, expected = stock
    compaction = {"policy": policy, "budget": "100%"}
    _, tokens, counts = outputs(prompts, dtype, compaction=compaction)
    assert tokens == expected
    assert counts.num_keys == counts.num_full_keys > 0


def test_lossless_drafts_give_stocks_tokens(stock, prompts, record_property):
    """In bfloat16 but for near-ties, from which on a text goes its own way: they are reported."""
    dtype, best, expected = stock
    _, tokens, counts = outputs(
        prompts,
        dtype,
        compaction={"policy": "lossless", "budget": "10%", "reselect_every_tokens": 16},
        speculative_config=engines.self_speculation(NUM_DRAFTS),
    )
    record_property("accepted_share", counts.num_accepted / counts.num_verified)
    print(f"\n{dtype}: {counts.num_accepted} of {counts.num_verified} drafts accepted")
    assert counts.num_keys < counts.num_full_keys / 2
    assert counts.num_accepted > counts.num_verified / 2
    for row, (ours, theirs) in enumerate(zip(tokens, expected, strict=True)):
        place = first_difference(ours, theirs)
        if place is None:
            continue
        logprobs = best[row][place]
        margin = logprobs[theirs[place]] - logprobs.get(ours[place], -100.0)
        print(f"{dtype}, request {row}: tokens differ from place {place} on, margin {margin:.3f}")
        assert dtype == "bfloat16", "float32 has no near-ties here"
        assert margin <= NEAR_TIE


@pytest.mark.parametrize("policy", ["attend", "retain"])
def test_small_budgets_read_less_and_still_write_text(stock, prompts, policy):
    """Lossy: what is promised is what is read. The first token comes of the whole prompt."""
    dtype, _, expected = stock
    compaction = {"policy": policy, "budget": "25%", "reselect_every_tokens": 8}
    _, tokens, counts = outputs(prompts, dtype, compaction=compaction)
    assert [row[0] for row in tokens] == [row[0] for row in expected]
    assert counts.num_keys < counts.num_full_keys / 2
    assert all(len(row) == NUM_NEW for row in tokens)
    agreeing = sum(
        a == b for pair in zip(tokens, expected, strict=True) for a, b in zip(*pair, strict=True)
    )
    print(f"\n{dtype}, {policy}: {agreeing} of {len(LENGTHS) * NUM_NEW} tokens are stock's")
