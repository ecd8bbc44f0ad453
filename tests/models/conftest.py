"""A tiny Llama as a GGUF file, with quantized weights and a byte-level tokenizer."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, INNER = 2, 4, 2, 16, 64, 96
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")


@pytest.fixture
def write_tiny_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes the tiny model: `write(adds_bos=..., adds_eos=..., without=tensor name)`."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("transformers")

    def write(*, adds_bos: bool = False, adds_eos: bool = False, without: str = "") -> Path:
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        _add_facts(writer, adds_bos=adds_bos, adds_eos=adds_eos)
        random = np.random.default_rng(0)
        for name, shape in _tensor_shapes().items():
            if name == without:
                continue
            tensor = random.standard_normal(shape).astype(np.float32)
            if len(shape) == 1:
                writer.add_tensor(name, tensor)
                continue
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _byte_alphabet() -> list[str]:
    """The printable stand-ins of all bytes in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def _add_facts(writer, *, adds_bos: bool, adds_eos: bool) -> None:
    tokens = [*SPECIAL_TOKENS, *_byte_alphabet(), "ab", "abc"]
    writer.add_name("tiny")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS)))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(adds_bos)
    writer.add_add_eos_token(adds_eos)


def _tensor_shapes() -> dict[str, tuple[int, ...]]:
    num_tokens = len(SPECIAL_TOKENS) + 256 + 2
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (num_tokens, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(NUM_LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (NUM_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, NUM_HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_gate.weight": (INNER, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (INNER, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, INNER),
        }
    return shapes
