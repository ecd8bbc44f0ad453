"""What a user asks for under `additional_config={"blockcompact": {...}}`. Imports no vllm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

# vLLM reads the configuration wherever the plugin is installed; JAX comes in where it is asked for.
if TYPE_CHECKING:
    from blockcompact_jax.budget import Budget

CONFIG_KEY = "blockcompact"
"""Key of vLLM's `additional_config` that switches compaction on."""

DEFAULT_EVERY_TOKENS = 16
"""Period where none is given, and the one that "auto" starts with."""

ESTIMATE_EVERY_TOKENS = 4
"""Period of selections by estimates where none is given."""

PolicyName = Literal["attend", "retain", "lossless"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

SelectionName = Literal["attention", "estimate"]
SELECTIONS: tuple[SelectionName, ...] = get_args(SelectionName)


@dataclass(frozen=True, kw_only=True)
class AttendConfig:
    """Decoding, or drafting, attends to selected blocks.

    Attributes:
        policy: "attend" leaves the full KV with vLLM, and every layer selects anew from all of it;
            "retain" selects once for all layers and gives the other blocks back to vLLM, for good;
            "lossless" selects as "attend" does, but for drafts only, which vLLM verifies.
        budget: whole blocks that each layer of a request attends to, sink and recent included; the
            partial block and what was generated since the last selection come on top.
        select_by: "attention" selects by what an earlier query attended to, measured over all keys;
            "estimate" by what the query at hand will attend to, estimated from a summary of the
            keys of each block, under "attend" alone.
        host_bytes: under "retain", most host memory of a worker for blocks that were given back,
            from which later selections bring them back; None for none: then they are gone.
        reselect_every_tokens: most generated tokens between two selections of a request; "auto"
            lets the engine choose.
        max_mass_lost: share of attention mass that a selection may lose to its age under "attend"
            and "auto"; None for the default.
        decision_log: file that every selection's decision is written to; None for none.
    """

    policy: PolicyName = "attend"
    budget: Budget
    select_by: SelectionName = "attention"
    reselect_every_tokens: int | Literal["auto"] = DEFAULT_EVERY_TOKENS
    host_bytes: int | None = None
    max_mass_lost: float | None = None
    decision_log: str | None = None


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
    known = {field.name for field in fields(AttendConfig)}
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
    budget = parse_budget(str(given["budget"]))
    check_budget(budget)
    rest: dict[str, Any] = {name: given[name] for name in _REST_NAMES if name in given}
    if rest.get("select_by") == "estimate":
        rest.setdefault("reselect_every_tokens", ESTIMATE_EVERY_TOKENS)
    config = AttendConfig(policy=policy, budget=budget, **rest)
    _check_host_bytes(config)
    _check_period(config)
    _check_selection(config)
    return config


_REST_NAMES = (
    "select_by",
    "reselect_every_tokens",
    "host_bytes",
    "max_mass_lost",
    "decision_log",
)


def _check_host_bytes(config: AttendConfig) -> None:
    from blockcompact_jax.budget import OptionError

    host_bytes = config.host_bytes
    if host_bytes is None:
        return
    if config.policy != "retain":
        raise OptionError(
            f"`host_bytes` is given with `policy` {config.policy!r}, expected 'retain': other "
            "policies give no blocks back"
        )
    if not isinstance(host_bytes, int) or isinstance(host_bytes, bool) or host_bytes < 1:
        raise OptionError(
            f"`host_bytes` is {host_bytes!r}, expected a whole number of bytes, for example {2**31}"
        )


def _check_period(config: AttendConfig) -> None:
    from blockcompact_jax.budget import OptionError
    from torch_bridge.held import check_every_tokens

    check_every_tokens(config.reselect_every_tokens, config.max_mass_lost)
    if config.max_mass_lost is not None and config.policy != "attend":
        raise OptionError(
            f"`max_mass_lost` is given with `policy` {config.policy!r}, expected 'attend': only "
            "there it bounds the choice of a period"
        )
    is_logged = config.decision_log is not None
    if config.policy == "retain" and (config.reselect_every_tokens == "auto" or is_logged):
        name = "decision_log" if is_logged else "reselect_every_tokens"
        raise OptionError(
            f"`{name}` is {getattr(config, name)!r} with `policy` 'retain', expected a number of "
            "tokens and no log: the attention to blocks that were given back is not known, so what "
            "a selection loses to its age is not either"
        )
    if is_logged and not isinstance(config.decision_log, str):
        raise OptionError(f"`decision_log` is {config.decision_log!r}, expected a file's name")


def _check_selection(config: AttendConfig) -> None:
    from blockcompact_jax.budget import OptionError

    if config.select_by not in SELECTIONS:
        raise OptionError(
            f"`select_by` is {config.select_by!r}, expected one of {', '.join(SELECTIONS)}"
        )
    if config.select_by == "attention":
        return
    if config.policy != "attend":
        raise OptionError(
            f"`select_by` is 'estimate' with `policy` {config.policy!r}, expected 'attend': "
            "under 'retain' all layers select together after a step, not one by one within it, "
            "and drafts are scored by the step that verifies them"
        )
    if config.reselect_every_tokens == "auto" or config.decision_log is not None:
        name = "reselect_every_tokens" if config.decision_log is None else "decision_log"
        raise OptionError(
            f"`{name}` is {getattr(config, name)!r} with `select_by` 'estimate', expected a number "
            "of tokens and no log: no query meets all keys, so what a selection loses is not known"
        )
