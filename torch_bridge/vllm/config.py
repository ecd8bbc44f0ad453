"""What a user asks for under `additional_config={"blockcompact": {...}}`. Imports no vllm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

# vLLM reads the configuration wherever the plugin is installed; JAX comes in where it is asked for.
if TYPE_CHECKING:
    from blockcompact_jax.budget import Budget

CONFIG_KEY = "blockcompact"
"""Key of vLLM's `additional_config` that switches compaction on."""


PolicyName = Literal["attend", "retain", "lossless"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@dataclass(frozen=True, kw_only=True)
class AttendConfig:
    """Decoding, or drafting, attends to selected blocks.

    Attributes:
        policy: "attend" leaves the full KV with vLLM, and every layer selects anew from all of it;
            "retain" selects once for all layers and gives the other blocks back to vLLM, for good;
            "lossless" selects as "attend" does, but for drafts only, which vLLM verifies.
        budget: whole blocks that each layer of a request attends to, sink and recent included; the
            partial block and what was generated since the last selection come on top.
        host_bytes: under "retain", most host memory of a worker for blocks that were given back,
            from which later selections bring them back; None for none: then they are gone.
        reselect_every_tokens: most generated tokens between two selections of a request.
    """

    policy: PolicyName = "attend"
    budget: Budget
    reselect_every_tokens: int = 16
    host_bytes: int | None = None


def parse_config(additional_config: Any) -> AttendConfig | None:
    """Reads vLLM's `additional_config`.

    Args:
        additional_config: as the user gave it.

    Returns:
        The configuration, None where compaction is not asked for.

    Raises:
        OptionError: for an unknown key or a value that cannot be used.
    """
    if not isinstance(additional_config, Mapping) or CONFIG_KEY not in additional_config:
        return None
    return _parse(additional_config[CONFIG_KEY])


def _parse(given: Any) -> AttendConfig:
    from blockcompact_jax.budget import OptionError, check_budget, parse_budget

    if not isinstance(given, Mapping):
        raise OptionError(
            f"`{CONFIG_KEY}` is {given!r}, expected a mapping like {{'budget': '10%'}}"
        )
    known = {"policy", "budget", "reselect_every_tokens", "host_bytes"}
    unknown = sorted(set(given) - known)
    if unknown:
        raise OptionError(
            f"`{CONFIG_KEY}` has the unknown key {unknown[0]!r}, expected one of "
            f"{', '.join(sorted(known))}"
        )
    if "budget" not in given:
        raise OptionError(f"`{CONFIG_KEY}` has no `budget`; give one, for example '10%' or '32b'")
    policy = given.get("policy", AttendConfig.policy)
    if policy not in POLICIES:
        raise OptionError(f"`policy` is {policy!r}, expected one of {', '.join(POLICIES)}")
    every = given.get("reselect_every_tokens", AttendConfig.reselect_every_tokens)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise OptionError(
            f"`reselect_every_tokens` is {every!r}, expected a whole number of 1 or more"
        )
    budget = parse_budget(str(given["budget"]))
    check_budget(budget)
    host_bytes = given.get("host_bytes")
    _check_host_bytes(host_bytes, policy)
    return AttendConfig(
        policy=policy, budget=budget, reselect_every_tokens=every, host_bytes=host_bytes
    )


def _check_host_bytes(host_bytes: Any, policy: PolicyName) -> None:
    from blockcompact_jax.budget import OptionError

    if host_bytes is None:
        return
    if policy != "retain":
        raise OptionError(
            f"`host_bytes` is given with `policy` {policy!r}, expected 'retain': other policies "
            "give no blocks back"
        )
    if not isinstance(host_bytes, int) or isinstance(host_bytes, bool) or host_bytes < 1:
        raise OptionError(
            f"`host_bytes` is {host_bytes!r}, expected a whole number of bytes, for example {2**31}"
        )
