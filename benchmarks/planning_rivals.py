"""The inputs of the planning benchmark, their answer, and what else would give it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

HOLE = -1
Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A number of layers, each ranking `blocks` scores for `wanted` blocks."""

    layers: int
    blocks: int
    wanted: int

    @property
    def name(self) -> str:
        """Layers, blocks and wanted."""
        return f"{self.layers}x{self.blocks}x{self.wanted}"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Scores, what is held, and the answer.

    Attributes:
        old_scores: float32 [layer, block]; their best blocks are held.
        scores: A fifth of the old ones moved to other blocks.
        is_held: bool [layer, block].
        expected: int32 [layer, wanted]: the best blocks that are not held, ascending.
    """

    old_scores: np.ndarray
    scores: np.ndarray
    is_held: np.ndarray
    expected: np.ndarray


def make_inputs(workload: Workload, *, has_ties: bool = False) -> Inputs:
    """Heavy-tailed scores, all different in a row; or so few values that ties straddle the cut."""
    rng = np.random.default_rng(0)
    falling = np.exp(-8.0 * np.arange(workload.blocks) / workload.blocks).astype(np.float32)
    if has_ties:
        falling = np.round(falling * 8.0) / np.float32(8.0)
    old_scores = rng.permuted(np.tile(falling, (workload.layers, 1)), axis=1)
    scores = old_scores.copy()
    for row in scores:
        moved = rng.permutation(workload.blocks)[: workload.blocks // 5]
        row[moved] = row[rng.permutation(moved)]
    is_held = best_mask(old_scores, workload.wanted)
    is_new = best_mask(scores, workload.wanted) & ~is_held
    return Inputs(
        old_scores=old_scores,
        scores=scores,
        is_held=is_held,
        expected=padded(is_new, workload.wanted),
    )


def best_mask(scores: np.ndarray, wanted: int) -> np.ndarray:
    """The reference: a stable sort of every row."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :wanted]
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, order, values=True, axis=1)
    return mask


def padded(mask: np.ndarray, capacity: int) -> np.ndarray:
    out = np.full((mask.shape[0], capacity), HOLE, np.int32)
    rows, blocks = np.nonzero(mask)
    counts = mask.sum(1)
    places = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)
    out[rows, places] = blocks
    return out


def check(name: str, got: Any, expected: np.ndarray) -> None:
    if not np.array_equal(np.asarray(got), expected):
        raise SystemExit(f"{name} gives a wrong answer, so nothing is timed.")


def numpy_rank(workload: Workload, inputs: Inputs) -> Call:
    scores, is_held, wanted = inputs.scores, inputs.is_held, workload.wanted

    def call() -> np.ndarray:
        cut = workload.blocks - wanted
        best = np.argpartition(scores, cut, axis=1)[:, cut:]
        threshold = np.take_along_axis(scores, best, axis=1).min(1, keepdims=True)
        mask = scores > threshold
        is_tied = scores == threshold
        num_tied = wanted - mask.sum(1, keepdims=True)
        mask |= is_tied & (np.cumsum(is_tied, axis=1) <= num_tied)
        mask &= ~is_held
        return padded(mask, wanted)

    return call


def torch_rank(workload: Workload, inputs: Inputs, num_threads: int) -> Call | None:
    try:
        import torch
    except ImportError:
        print("torch is not installed: its rows are skipped.", file=sys.stderr)
        return None
    scores, is_held = torch.from_numpy(inputs.scores), torch.from_numpy(inputs.is_held)
    wanted, past = workload.wanted, workload.blocks

    def cut_ties(threshold: torch.Tensor) -> torch.Tensor:
        mask = scores > threshold
        is_tied = scores == threshold
        num_tied = wanted - mask.sum(1, keepdim=True)
        mask |= is_tied & (is_tied.cumsum(1) <= num_tied)
        return mask.nonzero()[:, 1].reshape(-1, wanted)

    def call() -> torch.Tensor:
        torch.set_num_threads(num_threads)
        values, best = torch.topk(scores, wanted, dim=1, sorted=False)
        threshold = values.min(1, keepdim=True).values
        if int((scores >= threshold).sum()) != best.numel():  # ties: topk took any of them
            best = cut_ties(threshold)
        best = torch.where(is_held.gather(1, best), past, best).sort(1).values
        return torch.where(best == past, HOLE, best).to(torch.int32)

    return call


def cpp_ranks(workload: Workload, inputs: Inputs, library: ctypes.CDLL | None) -> dict[str, Call]:
    if library is None:
        return {}
    is_held = inputs.is_held.view(np.uint8)
    out = np.empty((workload.layers, workload.wanted), np.int32)

    def call(function: Any) -> np.ndarray:
        function(
            ctypes.c_void_p(inputs.scores.ctypes.data),
            ctypes.c_void_p(is_held.ctypes.data),
            ctypes.c_int64(workload.layers),
            ctypes.c_int64(workload.blocks),
            ctypes.c_int64(workload.wanted),
            ctypes.c_void_p(out.ctypes.data),
        )
        return out

    return {
        "rank: C++ radix": partial(call, library.PlanRadix),
        "rank: C++ nth_element": partial(call, library.PlanNthElement),
    }


def build_twin(folder: Path) -> ctypes.CDLL | None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        print("No C++ compiler is installed: its rows are skipped.", file=sys.stderr)
        return None
    target = folder / "planning_twin.so"
    source = Path(__file__).with_name("planning_twin.cc")
    flags = ["-std=c++17", "-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))
