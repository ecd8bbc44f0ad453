"""Which tests name which contracts: the one rule, applied to test sources without running them.

A test names a contract where the number stands literally in the name of the test function
(`test_SEL_3_…`) or in its docstring (SEL-3). Ranges, comments and file names name nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.monitor.contracts import numbers_in

GPU_AREA = "gpu"
"""Area of the tests marked `gpu`, wherever they lie."""


@dataclass(frozen=True, kw_only=True)
class NamedTest:
    """One test function.

    Attributes:
        path: its file, from the root, with forward slashes.
        name: its name, with its class: `test_x` or `TestY.test_x`.
        contracts: the contracts it names.
        area: the folder below the test folder (the file's stem at its top), or "gpu".
    """

    path: str
    name: str
    contracts: tuple[str, ...]
    area: str

    @property
    def module(self) -> str:
        """Dotted name of its file."""
        return self.path.removesuffix(".py").replace("/", ".")

    @property
    def label(self) -> str:
        """How pytest names it."""
        return f"{self.path}::{self.name.replace('.', '::')}"


def contracts_named_by(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    """Contracts that a test function names: the rule."""
    return numbers_in(f"{function.name} {ast.get_docstring(function) or ''}")


def find_tests(folder: Path, *, root: Path) -> tuple[NamedTest, ...]:
    """Finds all test functions below a folder, in order of files and lines.

    Args:
        folder: the folder of tests.
        root: what paths are given from; pytest's root directory.

    Raises:
        CompactionError: if there is no test, or a file cannot be parsed.
    """
    tests = [
        test
        for path in sorted(folder.rglob("test_*.py"))
        for test in _tests_of(path, folder=folder, root=root)
    ]
    if not tests:
        raise CompactionError(f"`tests` is {str(folder)!r}, which holds no test; give a folder.")
    return tuple(tests)


def _tests_of(path: Path, *, folder: Path, root: Path) -> Iterator[NamedTest]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise CompactionError(f"`tests` holds {path}, which is not Python: {error}.") from error
    inside = path.relative_to(folder)
    area = inside.parts[0] if len(inside.parts) > 1 else inside.stem
    is_gpu_module = any(map(_is_gpu_pytestmark, tree.body))
    for prefix, function in _functions(tree.body):
        is_gpu = is_gpu_module or any(map(_is_gpu_mark, function.decorator_list))
        yield NamedTest(
            path=path.relative_to(root).as_posix(),
            name=f"{prefix}{function.name}",
            contracts=contracts_named_by(function),
            area=GPU_AREA if is_gpu else area,
        )


def _functions(
    body: list[ast.stmt], prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif _is_function(node) and node.name.startswith("test"):
            yield prefix, node


def _is_function(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _is_gpu_pytestmark(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    return "pytestmark" in names and _is_gpu_mark(node.value)


def _is_gpu_mark(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr == "gpu" for part in ast.walk(node))
