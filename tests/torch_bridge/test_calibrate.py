"""Terms of a retention decision, measured on a tiny model; nothing here looks at a time's size."""

import json
from types import SimpleNamespace

import pytest

from blockcompact_jax.budget import parse_budget
from torch_bridge.huggingface.calibrate import calibrate
from torch_bridge.huggingface.options import RunOptions

pytestmark = pytest.mark.slow


def test_CST_1_CST_2_measured_terms_have_samples_and_the_others_no_value(llama):
    """CST-1, CST-2: an unmeasured term is no 0, leaves the decision open, and is named in it."""
    loaded = SimpleNamespace(model=llama, name="tiny", max_positions=1024)
    context = [place % 97 for place in range(200)]
    options = RunOptions(budget=parse_budget("3b"))
    found = calibrate(options, loaded, context, num_samples=3, horizon_steps=5, margin_us=2.0)
    plain = json.loads(json.dumps(found.to_dict()))
    terms = plain["costs"] | plain["benefits"]
    unmeasured = [name for name, term in terms.items() if term["value_us"] is None]
    assert unmeasured == ["metadata", "avoided_stall", "output_penalty"]
    for name, term in terms.items():
        assert term["source"] == ("unmeasured" if name in unmeasured else "measured")
    assert terms["plan"]["value_us"] > 0
    assert {len(values) for values in plain["samples"].values()} == {3}
    decision = plain["decision"]
    assert (decision["is_retained"], decision["cost_us"]) == (None, None)
    assert decision["unmeasured"] == unmeasured
    assert (decision["costs"], decision["benefits"]) == (plain["costs"], plain["benefits"])
    assert (decision["horizon_steps"], decision["margin_us"]) == (5, 2.0)
    assert llama.config._attn_implementation == "sdpa"
