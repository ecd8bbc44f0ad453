"""Which model a name means, without fetching or loading it. Needs no torch."""

from pathlib import Path

from torch_bridge.models.errors import UnknownModelError
from torch_bridge.models.registry import MODELS, find_source


def check_model_name(name: str) -> None:
    """Refuses what is no short name, path or hub name. Whether a hub has the model is not asked.

    Raises:
        UnknownModelError: saying what it is not.
    """
    if name not in MODELS:
        find_model(name)


def find_model(name: str) -> Path | None:
    """Where a model that has no short name lies on this machine; None for a hub name.

    Args:
        name: A local directory, a .gguf file, or a hub name (`owner/model`).

    Raises:
        UnknownModelError: It is none of these.
    """
    path = Path(name).expanduser()
    if not name.strip():
        raise UnknownModelError("`model` is empty, expected a name or a path")
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise UnknownModelError(
            f"`model` got the file {name!r}, expected a .gguf file or a model directory"
        )
    if path.is_dir():
        return _find_in(path)
    is_hub_name = name.count("/") == 1 and not name.startswith((".", "/", "~", "-"))
    if is_hub_name and path.suffix != ".gguf":
        return None
    if "/" in name or path.suffix == ".gguf":
        raise UnknownModelError(f"`model` got {name!r}, which is not a file or directory here")
    find_source(name)  # Raises, naming the known names.
    return None


def _find_in(directory: Path) -> Path:
    """The directory itself when transformers can read it, else its only GGUF file."""
    if (directory / "config.json").is_file():
        return directory
    candidates = sorted(directory.glob("*.gguf"))
    if len(candidates) != 1:
        raise UnknownModelError(
            f"`model` got the directory {str(directory)!r} with no config.json and "
            f"{len(candidates)} .gguf files, expected a config.json or exactly one .gguf file"
        )
    return candidates[0]
