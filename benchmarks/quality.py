"""How well compacted attention predicts, beside kvpress at equal budgets, on the same tokens.

    python benchmarks/quality.py --json PATH [--kvpress-python ENV/bin/python]

Contexts are prefilled with full attention; then tokens that are known are fed one by one, and each
prediction is compared with that of the whole cache: KL divergence, equal best token, and for
needles whether the answer's own tokens are found. Ours never attend to more tokens than the presses
keep. All samples are stored. Nothing here is timed.

PATH is written after every method of a text, and what it holds is not computed again: a run that
was stopped goes on where it was, and other models, contexts and dtypes come beside those it holds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from quality_ours import BUDGETS, OURS, our_results
from quality_rows import mean_table, results_of, rows_of, text_table
from quality_texts import NUM_TEXTS, Job, needle_jobs, text_jobs

from blockcompact_jax.provenance import origin
from torch_bridge.models.load import LoadedModel, load_model

MODELS = ("smollm2-135m", "gemma3-270m")
Unit = tuple[str, str]
"""A job and a method: what is computed and stored at once, for all budgets."""


class Store:
    """The results of one setting in a file that may hold those of others."""

    def __init__(self, path: Path, about: dict[str, Any], setting: dict[str, Any]) -> None:
        """Reads what is there.

        Args:
            path: of the file.
            about: what all results of a file have in common: where they come from.
            setting: what all results of this store have in common.
        """
        self._path, self._about, self._setting = path, about, setting
        stored = json.loads(path.read_text()) if path.exists() else {**about, "results": []}
        for name, value in about.items():
            if stored.get(name) != value:
                raise SystemExit(
                    f"`--json` {path} has other {name} than this run; give a new file or remove it"
                )
        rows = stored["results"]
        is_own = [all(row[name] == value for name, value in setting.items()) for row in rows]
        self._others = [row for row, own in zip(rows, is_own, strict=True) if not own]
        self._results = results_of([row for row, own in zip(rows, is_own, strict=True) if own])
        self.done: set[Unit] = {(r["job"], r["method"]) for r in self._results}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of this setting."""
        return rows_of(self._setting, self._results)

    def add(self, results: Iterable[dict[str, Any]]) -> None:
        """Takes results as they come, and writes the file after the last budget of a unit."""
        unit: list[dict[str, Any]] = []
        for result in results:
            unit.append(result)
            if len(unit) < len(BUDGETS):
                continue
            self._results += unit
            self.done.add((result["job"], result["method"]))
            print(f"{result['job']}: {result['method']}", file=sys.stderr, flush=True)
            unit = []
            self._write()

    def _write(self) -> None:
        rows = [*self._others, *self.rows]
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps({**self._about, "results": rows}) + "\n")
        unfinished.replace(self._path)  # a run that is stopped leaves a whole file


def all_our_results(loaded: LoadedModel, jobs: list[Job], done: set[Unit]) -> Iterator[Any]:
    """What is not done yet of ours."""
    with torch.inference_mode():
        for job in jobs:
            methods = [method for method in OURS if (job.name, method.name) not in done]
            if methods:
                yield from our_results(loaded.model, job, methods=methods)


def kvpress_results(
    python: str, loaded: LoadedModel, dtype: str, jobs: list[Job], done: set[Unit]
) -> Iterator[dict[str, Any]]:
    """What is not done yet of the presses, as their process gives it."""
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "jobs.json")
        document = {
            "model_path": str(loaded.path),
            "dtype": dtype,
            "budgets": BUDGETS,
            "jobs": [vars(job) for job in jobs],
            "done": sorted(done),
        }
        given.write_text(json.dumps(document))
        script = Path(__file__).with_name("quality_rivals.py")
        command = [python, str(script), str(given)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            yield from map(json.loads, process.stdout or ())
        if process.returncode:
            raise SystemExit(f"{script.name} ended with status {process.returncode}")


def kvpress_versions(python: str) -> dict[str, str]:
    """Versions in the environment of the presses."""
    program = (
        "import json; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in ('kvpress', 'torch', 'transformers')}))"
    )
    done = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="file to write results to")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="names or paths")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--kvpress-python", help="interpreter of an environment with kvpress")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each context")
    parser.add_argument("--tokens", type=int, default=88, help="tokens predicted after a text")
    parser.add_argument("--texts", type=int, default=NUM_TEXTS)
    parser.add_argument(
        "--needles", type=int, nargs="*", default=[1024, 2048], help="lengths of their contexts"
    )
    arguments = parser.parse_args()
    python = arguments.kvpress_python
    if python is None and importlib.util.find_spec("kvpress") is not None:
        python = sys.executable
    versions = "not installed" if python is None else kvpress_versions(python)
    for name in arguments.models:
        loaded = load_model(name, dtype=getattr(torch, arguments.dtype))
        jobs = text_jobs(
            loaded.tokenizer,
            context_tokens=arguments.context,
            num_tokens=arguments.tokens,
            num_texts=arguments.texts,
        )
        jobs += needle_jobs(loaded.tokenizer, lengths=arguments.needles)
        setting = {
            "model": name,
            "dtype": arguments.dtype,
            "context_tokens": arguments.context,
            "num_predicted_tokens": arguments.tokens,
        }
        store = Store(arguments.json, {**origin(), "kvpress_versions": versions}, setting)
        store.add(all_our_results(loaded, jobs, store.done))
        if python is not None:
            store.add(kvpress_results(python, loaded, arguments.dtype, jobs, store.done))
        print(f"\n{name}, {arguments.dtype}, {arguments.context:,} tokens")
        for table in (mean_table(store.rows), *(text_table(store.rows, each) for each in BUDGETS)):
            print("\n".join(table), end="\n\n")
    if python is None:
        print("kvpress: not installed")


if __name__ == "__main__":
    main()
