"""A sweep over vLLM's policies with a real model: rows beside stock vLLM of the same process."""

import importlib.util
import json
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; pip install 'blockcompact-jax[vllm]'")

pytestmark = [pytest.mark.models, pytest.mark.slow]

PROGRAM = [sys.executable, "-P", "-c", "from blockcompact_jax.cli import main; main()", "sweep"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the [models] extra: gguf")
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "grid.toml").write_text(
        "context = 320\nnew-tokens = 24\n"
        '[[grid]]\nengine = ["vllm-retain", "vllm-attend"]\nbudget = ["4b", "100%"]\n'
        '[[grid]]\nengine = "vllm-lossless"\nbudget = "4b"\ndraft-tokens = 4\n'
    )
    done = subprocess.run(
        [*PROGRAM, "--file", "grid.toml"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    lines = (folder / "sweep.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return {
        (row["configuration"]["engine"], row["configuration"]["budget"]): row["report"]
        for row in found
    }


def test_MON_1_policies_stand_beside_stock_vllm(rows):
    """MON-1: speed against stock attention, key shares, and what the tokens are."""
    assert len(rows) == 5
    for report in rows.values():
        assert report["speedup_vs_full"] > 0
        assert report["new_tokens"] == 24
        assert report["context_tokens"] == 320
    for engine in ("vllm-retain", "vllm-attend"):
        everything, few = rows[engine, "100%"], rows[engine, "4b"]
        assert everything["tokens_identical_to_full"] is True
        assert everything["attended_share_of_keys"] == 1.0
        assert 0.3 < few["attended_share_of_keys"] < 0.7
        assert few["acceptance_rate"] is few["tokens_per_round"] is None


def test_OWN_4_retain_alone_gives_blocks_back(rows):
    """OWN-4: counted in vLLM's own pool, before the last step."""
    assert rows["vllm-attend", "4b"]["pool_blocks"] == {"prefilled": 10, "last": 11}
    assert rows["vllm-retain", "100%"]["pool_blocks"]["last"] == 11
    assert rows["vllm-retain", "4b"]["pool_blocks"]["last"] <= 6


def test_drafts_leave_stocks_tokens_and_their_acceptance_is_said(rows):
    report = rows["vllm-lossless", "4b"]
    assert report["tokens_identical_to_full"] is True
    assert 0 < report["acceptance_rate"] <= 1
    assert report["tokens_per_round"] > 1
    assert report["attended_share_of_keys"] < 1
