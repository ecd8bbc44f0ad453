"""The README's example is run as it stands, and its figures are those that were measured."""

import json
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
DTYPES = ("float32", "bfloat16")


def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    blocks = capsys.readouterr().out
    assert blocks.startswith("[ 0 ")


def test_every_page_of_the_documentation_is_listed():
    pages = {f"docs/{page.name}" for page in (README.parent / "docs").glob("*.md")}
    assert pages == set(re.findall(r"\]\((docs/\w+\.md)\)", README.read_text())) & pages


def test_the_measured_figures_are_those_of_the_file():
    path = README.parent / "benchmarks" / "results" / "end_to_end.json"
    if not path.exists():
        pytest.skip("not a source checkout")
    results = json.loads(path.read_text())["results"]
    shown = {
        cells[0]: cells[1:]
        for line in README.read_text().splitlines()
        if (cells := [cell.strip() for cell in line.strip("|").split("|")])[0] in DTYPES
    }
    assert set(shown) == {result["workload"]["dtype"] for result in results} == set(DTYPES)
    for result in results:
        *figures, tokens, peak = shown[result["workload"]["dtype"]]
        assert figures == [
            f"{result['full_ms_per_token']:.1f}",
            f"{result['compacted_ms_per_token']:.1f}",
            f"{result['speedup_vs_full']:.2f}",
            f"{result['tokens_per_round']:.1f}",
        ]
        assert peak == f"{result['peak_ratio']:.2f} times plain"
        parted = result["first_divergence"]
        if parted is None:
            assert tokens == f"all {result['samples'][0]['new_tokens']}"
        else:
            num_same = parted["position"] - result["workload"]["context"]
            assert tokens.startswith(f"first {num_same}, then a tie")
            assert f"({parted['logit_margin']:g})" in tokens
