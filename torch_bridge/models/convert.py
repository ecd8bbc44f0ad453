"""Read GGUF files exactly: weights dequantized, tokenizer complete. Convert them to safetensors."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers.processors import TemplateProcessing
from transformers import modeling_gguf_pytorch_utils
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Keep progress bars and warnings of transformers from showing, for the time of a block."""
    # transformers' own switch does not reach this one bar, which uses tqdm directly.
    reader_module: Any = modeling_gguf_pytorch_utils
    original_bar = reader_module.tqdm
    reader_module.tqdm = lambda tensors, **_: tensors
    verbosity = transformers_logging.get_verbosity()
    has_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        reader_module.tqdm = original_bar
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()


def gguf_source(path: Path) -> dict[str, Any]:
    """The arguments of transformers' `from_pretrained` that read the GGUF file `path`."""
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def read_gguf_tokenizer(path: Path) -> Any:
    """Build the tokenizer that the GGUF file `path` describes.

    transformers takes vocabulary and merges from the file but not whether a text starts with BOS
    and ends with EOS, which the file says too: without it every ID sequence of a Gemma model is
    wrong. That part is added here.

    Args:
        path: A GGUF file.

    Returns:
        A transformers tokenizer.
    """
    tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(**gguf_source(path))
    metadata, _ = read_gguf_metadata(str(path))
    before = [tokenizer.bos_token] if metadata.get("tokenizer.ggml.add_bos_token") else []
    after = [tokenizer.eos_token] if metadata.get("tokenizer.ggml.add_eos_token") else []
    if before or after:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1"]
            + [f"{token}:1" for token in after],
            special_tokens=[
                (token, tokenizer.convert_tokens_to_ids(token)) for token in (*before, *after)
            ],
        )
    return tokenizer


def convert_gguf(path: Path, directory: Path) -> None:
    """Convert a GGUF file to a transformers directory with float32 safetensors.

    The weights are the exact dequantized values; casting them down is left to the loader.

    Args:
        path: A GGUF file.
        directory: An existing directory that receives config, weights and tokenizer.
    """
    with quiet_transformers():
        read_gguf_tokenizer(path).save_pretrained(directory)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            **gguf_source(path),
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(directory)
