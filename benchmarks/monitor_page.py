"""Load and filter times of the monitor's page with many rows, in an installed Chromium.

python benchmarks/monitor_page.py --json monitor_page.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from blockcompact_jax.monitor.page import build_page
from blockcompact_jax.provenance import machine, package_versions

NUM_ROWS = 10_000
FILTERED = """text => {
  const input = document.querySelector("#runs input"), start = performance.now();
  input.value = text;
  input.dispatchEvent(new Event("input"));
  document.body.getBoundingClientRect();  // lays the page out
  return performance.now() - start;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write results to")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = write_page(Path(folder))
        samples = [measure(page) for _ in range(arguments.repeats)]
        size = page.stat().st_size
    row: dict[str, Any] = {"rows": NUM_ROWS, "page_bytes": size}
    for name in samples[0]:
        row[f"{name}_median"] = statistics.median(sample[name] for sample in samples)
    document = {
        "machine": machine(),
        "versions": package_versions(),
        "results": [{**row, "samples": samples}],
    }
    arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(row))


def write_page(folder: Path) -> Path:
    """A page of a sweep whose rows have every value that a real run reports."""
    contracts = folder / "contracts.md"
    contracts.write_text("## ABC — things\n- ABC-1 One thing.\n", encoding="utf-8")
    results = folder / "sweep.jsonl"
    with results.open("w") as file:
        for number in range(NUM_ROWS):
            file.write(json.dumps(row_of(number)) + "\n")
    page = folder / "page.html"
    page.write_text(build_page(document=contracts, checks=None, results=[results]))
    return page


def row_of(number: int) -> dict[str, Any]:
    """One row of a sweep, of the shape that `blockcompact sweep` writes."""
    policy = ("attention", "recency", "random")[number % 3]
    metrics = dict.fromkeys(("h2d_bytes", "unpack_bytes", "scatter_bytes"), number * 1000)
    report = {
        "token_ids": [],
        "model": "smollm2-135m",
        "context_tokens": 1000 + number % 97,
        "block_tokens": 32,
        "budget": f"{number % 50 + 1}%",
        "budget_blocks": number % 16,
        "dtype": "float32",
        "policy": policy,
        "acceptance_rate": (number % 101) / 100,
        "tokens_per_round": number % 9,
        "speedup_vs_full": 1 + (number % 77) / 50,
        "tokens_per_second": number / 100,
        "seconds": dict.fromkeys(("load", "prefill", "draft", "verify"), number / 7),
        "metrics": {**metrics, "physical_blocks_released": number % 500, "plan_us": number / 3},
        "memory_bytes": dict.fromkeys(("weights", "resident_pool", "scratch"), number),
    }
    return {
        "schema": "blockcompact sweep row, version 1",
        "configuration_hash": f"{number:064x}",
        "configuration": {"draft_tokens": 8, "lookup_tokens": 7, "seed": number},
        "state": "done",
        "error": None,
        "created": "2026-01-02T03:04:05+00:00",
        "wall_seconds": 1.0,
        "machine": {},
        "versions": {},
        "sources": {},
        "report": report,
    }


def measure(page: Path) -> dict[str, float]:
    """Loads the page in a fresh browser and filters it; milliseconds."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        tab = browser.new_page()
        tab.goto(page.as_uri())
        load_ms = tab.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
        many_ms = tab.evaluate(FILTERED, "policy=random")
        few_ms = tab.evaluate(FILTERED, "policy=recency budget=7%")
        shown = tab.locator("#runs .bar span").inner_text()
        browser.close()
    expected = sum(
        row["policy"] == "recency" and row["budget"].startswith("7%") for row in _reports()
    )
    if not shown.startswith(f"{expected} of"):
        raise SystemExit(f"the page shows {shown}, expected {expected}; nothing was measured")
    return {"load_ms": load_ms, "filter_many_ms": many_ms, "filter_few_ms": few_ms}


def _reports() -> list[dict[str, Any]]:
    return [row_of(number)["report"] for number in range(NUM_ROWS)]


if __name__ == "__main__":
    main()
