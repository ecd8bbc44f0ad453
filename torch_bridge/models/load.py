"""Load a model and its tokenizer by short name, path or hub name, ready for inference."""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from huggingface_hub.errors import HfHubHTTPError

from torch_bridge.models.cache import damaged_remedy
from torch_bridge.models.convert import gguf_source, quiet_transformers, read_gguf_tokenizer
from torch_bridge.models.errors import DamagedModelError, ModelError, UnknownModelError
from torch_bridge.models.fetch import fetch_model
from torch_bridge.models.locate import find_model
from torch_bridge.models.progress import SilentObserver, StageObserver
from torch_bridge.models.registry import MODELS

_HUB_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in evaluation mode without gradients, and its tokenizer.

    Attributes:
        model: A transformers causal language model, on the CPU.
        tokenizer: Its transformers tokenizer.
        name: What it was asked for as.
        path: Directory or GGUF file it was loaded from; None when the hub's own cache holds it.
        load_seconds: Wall-clock time of loading, without fetching.
        weights_bytes: Bytes of all parameters, tied ones counted once.
    """

    model: Any
    tokenizer: Any
    name: str
    path: Path | None
    load_seconds: float
    weights_bytes: int

    @property
    def max_positions(self) -> int | None:
        """Token positions the model was made for; None when its configuration does not say."""
        return getattr(self.model.config, "max_position_embeddings", None)


def load_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    observer: StageObserver | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Args:
        name_or_path: A short name of the registry (fetched on first use; it wins over a directory
            of that name in the working directory, which is reached as `./name`), a local directory
            (a transformers one, or with exactly one .gguf file), a .gguf file, or a hub name
            (`owner/model`).
        dtype: Data type of the weights, which are cast to it while they are read.
        attn_implementation: Name registered with transformers' attention interface, or None for
            the model's default.
        observer: Hears the stages of fetching and loading.

    Returns:
        The model on the CPU, in evaluation mode, no parameter requiring a gradient.

    Raises:
        UnknownModelError: `name_or_path` is none of these, or the hub has or reaches no such model.
        DamagedModelError: Files are missing, incomplete or altered.
        FetchError: A first use could not fetch the model.
        ValueError: transformers knows no `attn_implementation` of that name.
    """
    observer = observer or SilentObserver()
    name = str(name_or_path)
    path = locate_model(name, observer)
    remedy = damaged_remedy(name) if name in MODELS else "check the files or fetch them again"
    observer.on_stage(f"loading {name}", None)
    start = time.perf_counter()
    try:
        with quiet_transformers():
            model, tokenizer = _read(name, path, dtype)
    except (ModelError, MemoryError):
        raise
    except Exception as error:  # Readers of broken files raise every kind, even a bare Exception.
        reason = " ".join(str(error).split())[:300]
        if path is None:
            raise UnknownModelError(
                f"`model` got {name!r}: no such path here, and the model hub gave no such model "
                f"({reason}); known short names: {', '.join(MODELS)}"
            ) from error
        raise DamagedModelError(
            f"the model {name!r} in {path} cannot be loaded ({reason}); {remedy}"
        ) from error
    if attn_implementation is not None:
        model.set_attn_implementation(attn_implementation)
    return LoadedModel(
        model=model.eval().requires_grad_(False),
        tokenizer=tokenizer,
        name=name,
        path=path,
        load_seconds=time.perf_counter() - start,
        weights_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
    )


def locate_model(name: str, observer: StageObserver) -> Path | None:
    """Where the model lies on this machine, fetched if need be; None for a hub name.

    Raises:
        UnknownModelError: `name` is no short name, path or hub name.
        DamagedModelError, FetchError: as of `fetch_model`.
    """
    if name in MODELS:
        return fetch_model(name, observer=observer).directory
    return find_model(name)


def _read(name: str, path: Path | None, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer, every weight read from the files."""
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    if path is not None and path.suffix == ".gguf" and path.is_file():
        tokenizer = read_gguf_tokenizer(path)
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        options |= gguf_source(path)
    else:
        location = name if path is None else str(path)
        is_local = path is not None or not _is_hub_reachable(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(location, local_files_only=is_local)
        options |= {"pretrained_model_name_or_path": location, "local_files_only": is_local}
    factory: Any = transformers.AutoModelForCausalLM
    model, info = factory.from_pretrained(**options)
    # transformers fills absent weights with random numbers and only warns.
    absent = sorted([*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])])
    if absent:
        raise DamagedModelError(
            f"the model {name!r} in {path} lacks usable weights for {len(absent)} parameters, "
            f"the first is {absent[0]!r}; check the files or fetch them again"
        )
    return model, tokenizer


def hub_revision(name: str) -> str | None:
    """The commit of a hub model that loading it uses now; None where neither hub nor cache has it.

    Where the hub answers, its newest `config.json` is brought into the hub's cache first, as
    loading does.

    Args:
        name: A hub name (`owner/model`).
    """
    path: object = None
    if _is_hub_reachable(name):
        with suppress(
            Exception
        ):  # What the hub refuses comes up again, with its reason, on loading.
            path = huggingface_hub.hf_hub_download(name, "config.json")
    else:
        path = huggingface_hub.try_to_load_from_cache(name, "config.json")
    return Path(path).parent.name if isinstance(path, str) else None


def _is_hub_reachable(name: str) -> bool:
    """Whether the hub answers, asked once; transformers would retry for a minute without it."""
    try:
        url = huggingface_hub.hf_hub_url(name, "config.json")
        huggingface_hub.get_hf_file_metadata(url, timeout=_HUB_TIMEOUT_SECONDS)
    except HfHubHTTPError:
        return True  # It answered; what it said comes up again, with its reason, on loading.
    except Exception:  # Whatever the HTTP client in use raises for a network that fails.
        return False
    return True
