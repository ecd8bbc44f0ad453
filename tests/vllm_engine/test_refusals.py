"""Engines that compaction cannot serve do not start, and say why."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; pip install 'blockcompact-jax[vllm]'")

import engines

SPECULATION = {
    "method": "custom_class",
    "model": "engines.NoDrafts",
    "num_speculative_tokens": 2,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    saved = {}

    def model(save):
        if save not in saved:
            saved[save] = save(tmp_path_factory.mktemp("model"))
        return saved[save]

    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_prefix_caching": True}, "prefix caching is on"),
        ({"speculative_config": SPECULATION}, "speculative decoding is on"),
        ({"kv_cache_dtype": "fp8", "dtype": "bfloat16"}, "KV-cache dtype is 'fp8'"),
        ({"dtype": "float16"}, "dtype is torch.float16"),
        ({"compaction": {"budgets": "10%"}}, "unknown key 'budgets'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_engine_that_cannot_be_served_does_not_start(models, options, message):
    with (
        pytest.raises(ValueError, match=message),
        engines.engine(models(engines.save_llama), **({"compaction": {"budget": "10%"}} | options)),
    ):
        pytest.fail("it started")


LOSSLESS = {"policy": "lossless", "budget": "10%"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "its proposer is None, .*'model': 'torch_bridge.vllm.proposer.SelfSpeculation'"),
        ({"speculative_config": SPECULATION}, r"its proposer is custom_class engines\.NoDrafts"),
        ({"speculative_config": engines.self_speculation(129)}, "`num_speculative_tokens` is 129"),
    ],
    ids=["no proposer", "another proposer", "long drafts"],
)
def test_an_engine_that_cannot_draft_does_not_start(models, options, message):
    with (
        pytest.raises(ValueError, match=message),
        engines.engine(models(engines.save_llama), compaction=LOSSLESS, **options),
    ):
        pytest.fail("it started")


def test_drafts_for_a_model_without_full_attention_are_refused(models):
    with (
        pytest.raises(ValueError, match="no full-attention layers"),
        engines.engine(
            models(engines.save_windows_only),
            compaction=LOSSLESS,
            speculative_config=engines.self_speculation(2),
        ),
    ):
        pytest.fail("it started")


def test_the_proposer_without_the_policy_is_refused(models):
    with (
        pytest.raises(RuntimeError, match="`policy` is 'attend', expected 'lossless'"),
        engines.engine(
            models(engines.save_llama),
            compaction={"budget": "10%"},
            speculative_config=engines.self_speculation(2),
        ),
    ):
        pytest.fail("it started")


def test_the_proposer_without_the_plugin_is_refused(models):
    """As where `VLLM_PLUGINS` names other plugins only: the backend is the stock one."""
    with (
        pytest.raises(ValueError, match=r"CPUAttentionBackendImpl.* leave VLLM_PLUGINS unset"),
        engines.engine(
            models(engines.save_llama),
            backend=engines.STOCK,
            compaction=LOSSLESS,
            speculative_config=engines.self_speculation(2),
        ),
    ):
        pytest.fail("it started")


@pytest.mark.parametrize(
    "options",
    [
        {"compaction": {"budget": "10%"}},
        {"compaction": LOSSLESS, "speculative_config": engines.self_speculation(2)},
    ],
    ids=["attend", "lossless"],
)
def test_windowed_layers_in_a_full_attention_group_are_refused(models, options):
    with (
        pytest.raises(ValueError, match=r"2 of 4 layers .* sliding window"),
        engines.engine(models(engines.save_gemma), disable_hybrid_kv_cache_manager=True, **options),
    ):
        pytest.fail("it started")


def test_an_untested_version_is_refused(models, monkeypatch):
    from torch_bridge import versions

    older = replace(versions.TESTED["vLLM"], releases=("0.31.0",))
    monkeypatch.setitem(versions.TESTED, "vLLM", older)
    with (
        pytest.raises(versions.UntestedVersionError, match=r"0\.32\.0 .*0\.31\.0"),
        engines.engine(models(engines.save_llama), compaction={"budget": "10%"}),
    ):
        pytest.fail("it started")


def test_a_block_size_that_no_layout_has_is_refused_by_vllm(models):
    with (
        pytest.raises(ValueError, match="block"),
        engines.engine(models(engines.save_llama), compaction={"budget": "10%"}, block_size=16),
    ):
        pytest.fail("it started")


def test_without_the_key_nothing_of_jax_is_loaded(tmp_path):
    """vLLM loads the plugin wherever it is installed; who does not ask for it pays nothing."""
    program = "import sys; import torch_bridge.vllm.backend; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)


RETAIN = """
import sys
from vllm import LLM
if __name__ == "__main__":
    LLM(
        sys.argv[1],
        dtype="float32",
        max_model_len=256,
        block_size=32,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        additional_config={"blockcompact": {"policy": "retain", "budget": "25%"}},
    )
    print("it started")
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_one_process", [False, True])
def test_retain_says_which_variable_keeps_vllm_in_one_process(models, tmp_path, is_one_process):
    """By default vLLM has a worker process on CPUs, whatever executor is asked for."""
    program = tmp_path / "retain.py"
    program.write_text(RETAIN)
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    environment = {key: value for key, value in os.environ.items() if key != name}
    environment["VLLM_LOGGING_LEVEL"] = "INFO"
    if is_one_process:
        environment[name] = "0"
    done = subprocess.run(
        [sys.executable, program, models(engines.save_llama)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )
    assert ("it started" in done.stdout) == is_one_process
    active = (
        "blockcompact is active: policy retain, budget 25%, selections by attention, "
        "3 full-attention layers"
    )
    assert (active in done.stdout + done.stderr) == is_one_process
    assert (f"set the environment variable {name}=0" in done.stderr) == (not is_one_process)
