"""The shape of the planning core: what a stage may import, and what plan types look like."""

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path

import jax
import pytest

import blockcompact_jax

PACKAGE = Path(blockcompact_jax.__file__).parent
STAGES = [
    "scores",
    "selection_policy",
    "selection",
    "residency",
    "diff",
    "upload",
    "ownership",
    "retention",
]
SHARED = {
    "ids",
    "geometry",
    "errors",
    "checks",
    "masks",
    "mesh_axes",
    "operations",
    "operation_types",
    "ranking",
    "shared_results",
    "typed_jit",
}
PLANNING = [
    *STAGES,
    *sorted(SHARED),
    "pins",
    "step_types",
    "commit",
    "zero_delta",
    "step",
    "speculation",
    "metrics",
]


def relative_imports(name):
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            yield node.module, [alias.name for alias in node.names]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_only_types_of_earlier_stages(stage):
    """Stages never call each other; only `pins` and the composed step do."""
    earlier = STAGES[: STAGES.index(stage)]
    for module, names in relative_imports(stage):
        if module in SHARED:
            continue
        assert module in earlier, f"{stage} imports {module}"
        for name in names:
            assert name[0].isupper(), f"{stage} imports the function {module}.{name}"


@pytest.mark.parametrize("name", PLANNING)
def test_the_core_imports_no_engine_kernel_or_runtime(name):
    """The planning core needs JAX, NumPy and jaxtyping, nothing else of ours or others."""
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    allowed = {"jax", "numpy", "jaxtyping", "typing", "collections", "dataclasses", "enum"}
    allowed |= {"hashlib", "json", "functools", "math"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module.split(".")[0] in allowed
    assert {module for module, _ in relative_imports(name)} <= set(PLANNING)


def test_the_package_offers_the_names_of_its_api_and_no_others():
    api = importlib.import_module("blockcompact_jax.api")
    star = {}
    exec("from blockcompact_jax import *", star)
    assert set(api.__all__) == set(star) - {"__builtins__"} <= set(dir(blockcompact_jax))
    assert all(getattr(blockcompact_jax, name) is getattr(api, name) for name in api.__all__)
    for absent in ("no_such_name", "ref", "__wrapped__"):
        with pytest.raises(AttributeError, match=absent):
            getattr(blockcompact_jax, absent)


def plan_types():
    for name in [*STAGES, "errors", "pins", "step_types", "speculation"]:
        module = importlib.import_module(f"blockcompact_jax.{name}")
        for _, kind in inspect.getmembers(module, dataclasses.is_dataclass):
            fields = dataclasses.fields(kind)
            if kind.__module__ == module.__name__ and any("Int32" in str(f.type) for f in fields):
                yield kind


@pytest.mark.parametrize("kind", list(plan_types()), ids=lambda kind: kind.__name__)
def test_plan_types_are_frozen_registered_and_documented(kind):
    """No __post_init__: JAX rebuilds nodes with tracers, batched leaves and None."""
    assert kind.__dataclass_params__.frozen
    parameters = inspect.signature(kind).parameters.values()
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    assert "__post_init__" not in vars(kind)
    blank = kind(**{f.name: i for i, f in enumerate(dataclasses.fields(kind))})
    leaves = jax.tree.leaves(blank)
    static = [f for f in dataclasses.fields(kind) if f.metadata.get("static")]
    assert len(leaves) == len(dataclasses.fields(kind)) - len(static)
    if not kind.__name__.startswith("_"):
        for field in dataclasses.fields(kind):
            assert f"{field.name}:" in kind.__doc__ or f"{field.name} " in kind.__doc__, field.name
