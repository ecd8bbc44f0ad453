"""The compiled module, loaded on first use, and its registration with JAX."""

import functools
import importlib
from typing import Any

import jax

_CUDA_COMPILED = "compiled"  # how the account of a component that was compiled begins


class NativeModuleError(ImportError):
    """The compiled module is missing or refuses to load."""


@functools.cache
def load_native() -> Any:
    """Imports `blockcompact_jax._native` and registers its FFI targets, once.

    Those of the CUDA component, where it was compiled, are registered under the same names.

    Returns:
        The module, typed by `_native.pyi`.

    Raises:
        NativeModuleError: Where the module is missing, or where `BLOCKCOMPACT_FORCE_IMPL` names an
            implementation that this machine lacks.
    """
    try:
        module = importlib.import_module("blockcompact_jax._native")
    except ModuleNotFoundError as error:
        raise NativeModuleError(
            "the compiled module `blockcompact_jax._native` is missing; install the package with "
            "`pip install .` and a C++17 compiler"
        ) from error
    except ImportError as error:
        raise NativeModuleError(f"`blockcompact_jax._native` did not load: {error}") from error
    for name, capsule in module.ffi_targets().items():
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    if module.build_info()["cuda"].startswith(_CUDA_COMPILED):
        cuda = _import_cuda()
        module.set_device_runtime(cuda.device_runtime())
        for name, capsule in cuda.ffi_targets().items():
            jax.ffi.register_ffi_target(name, capsule, platform="CUDA")
    return module


def load_cuda() -> Any:
    """Imports `blockcompact_jax._cuda`, which starts no CUDA driver.

    Returns:
        The module: FFI targets and the device checks of `benchmarks/gpu_check.py`.

    Raises:
        NativeModuleError: Where it was not compiled, or does not load.
    """
    state: str = load_native().build_info()["cuda"]
    if not state.startswith(_CUDA_COMPILED):
        raise NativeModuleError(f"the CUDA component is {state}")
    return _import_cuda()


def build_info() -> dict[str, str | list[str]]:
    """Version, compiler, SIMD implementations (compiled, available, chosen) and the CUDA state.

    Raises:
        NativeModuleError: As `load_native`.
    """
    return load_native().build_info()


def _import_cuda() -> Any:
    try:
        return importlib.import_module("blockcompact_jax._cuda")
    except ImportError as error:
        raise NativeModuleError(
            f"`blockcompact_jax._cuda` was compiled but did not load: {error}"
        ) from error
