"""One text through stock model, verifier and draft, on a tiny model."""

from types import SimpleNamespace

import pytest

from blockcompact_jax.budget import OptionError, parse_budget
from torch_bridge import prompts
from torch_bridge.huggingface import forced
from torch_bridge.huggingface.options import RunOptions

pytestmark = pytest.mark.slow


@pytest.fixture
def loaded(llama):
    return SimpleNamespace(model=llama, tokenizer=None, name="tiny", max_positions=1024)


@pytest.fixture(autouse=True)
def text(monkeypatch):
    def build(tokenizer, *, context_tokens, **_):
        tokens = [(7 * place + place // 11) % 97 for place in range(min(context_tokens, 400))]
        return SimpleNamespace(token_ids=tokens, num_tokens=len(tokens))

    monkeypatch.setattr(prompts, "build_prompt", build)


def options(**changes):
    budget = parse_budget(changes.pop("budget", "4b"))
    return RunOptions(
        **{
            "context_tokens": 300,
            "num_new_tokens": 20,
            "num_draft_tokens": 3,
            "reselect_every_rounds": 2,
            "budget": budget,
            **changes,
        }
    )


def test_CMP_2_CMP_3_the_verifier_agrees_and_the_policy_is_another_result(loaded):
    """CMP-2, CMP-3, CMP-4: all positions, j > 0 too; the draft's distance is no violation."""
    found = forced.compare_forced(options(), loaded)
    assert found.is_held
    assert found.numeric.num_compared_positions == found.draft.num_compared_positions == 20
    assert found.numeric.not_compared_positions == ()
    assert found.numeric.violation_rate == 0
    assert found.numeric.max_kl < 1e-6 < found.draft.max_kl
    assert found.paths.num_selections == len(found.selections) == 3
    assert found.to_dict()["is_held"] is True


def test_CMP_2_with_every_block_resident_the_draft_agrees_too(loaded):
    """CMP-2: a draft that reads all blocks is the full model."""
    found = forced.compare_forced(options(budget="100%"), loaded)
    assert found.draft.violation_rate == 0
    assert found.draft.top1_agreement == 1


def test_CMP_4_a_wrong_verifier_is_a_numeric_violation_alone(loaded, monkeypatch):
    """CMP-2, CMP-4: logits out of tolerance are found, and no byte is blamed for them."""
    session = forced.CompactionSession
    right = session.verify
    monkeypatch.setattr(
        session, "verify", lambda self, tokens, **rest: right(self, tokens, **rest) + 1
    )
    found = forced.compare_forced(options(), loaded)
    assert found.numeric.violation_rate == 1
    assert found.paths.is_equal
    assert not found.is_held


def test_CMP_2_CMP_3_positions_after_another_token_are_listed_as_not_compared(loaded, monkeypatch):
    """CMP-2, CMP-3: what a side consumed decides, not what it was meant to."""
    session = forced.CompactionSession
    right, drafted = session.draft_step, []

    def draft_step(self, tokens):
        drafted.append(tokens[0])
        return right(self, [(tokens[0] + (len(drafted) == 8)) % 97])

    monkeypatch.setattr(session, "draft_step", draft_step)
    found = forced.compare_forced(options(), loaded)
    assert found.draft.not_compared_positions == tuple(range(7, 20))
    assert found.draft.num_compared_positions == 7
    assert found.numeric.not_compared_positions == ()
    assert not loaded.model.get_input_embeddings()._forward_pre_hooks


def test_the_models_own_attention_is_back_afterwards(loaded):
    before = loaded.model.config._attn_implementation
    forced.compare_forced(options(), loaded)
    assert loaded.model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_new_tokens": 101}, "need a text of 401"),
        ({"context_tokens": 40}, "fewer than the budget of 2"),
    ],
)
def test_a_text_that_is_too_short_is_refused(loaded, changes, said):
    with pytest.raises(OptionError, match=said):
        forced.compare_forced(options(**changes), loaded)
