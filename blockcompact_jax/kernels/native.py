"""The compiled module, loaded on first use, and its registration with JAX."""

import functools
import importlib
from typing import Any

import jax


class NativeModuleError(ImportError):
    """The compiled module is missing or refuses to load."""


@functools.cache
def load_native() -> Any:
    """Imports `blockcompact_jax._native` and registers its FFI targets for CPU, once.

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
    return module


def build_info() -> dict[str, str | list[str]]:
    """Version, compiler, SIMD implementations (compiled, available, chosen) and the CUDA state.

    Raises:
        NativeModuleError: As `load_native`.
    """
    return load_native().build_info()
