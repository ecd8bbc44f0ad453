"""Shared test set-up: CPU backend, strict promotion, Hypothesis profiles."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from hypothesis import HealthCheck, settings

from blockcompact_jax.monitor.run_record import pytest_sessionstart  # noqa: F401  # a hook

jax.config.update("jax_numpy_dtype_promotion", "strict")

# The first example of a test pays for compilation, so no example has a deadline.
settings.register_profile(
    "ci",
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "nightly", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
