"""Reading GGUF exactly, converting, and loading, on a tiny model that the test writes itself."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
import gguf
import torch

from torch_bridge.models.convert import convert_gguf
from torch_bridge.models.errors import DamagedModelError, ModelError, UnknownModelError
from torch_bridge.models.load import load_model

TEXT = "abc a é"
TEXT_TOKENS = ["abc", "Ġ", "a", "Ġ", "Ã", "©"]  # One merged token, then single bytes.


def _untangle(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's interleaving of the two rotary halves of each head."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def test_float32_weights_are_the_dequantized_values_to_the_bit(
    write_tiny_gguf: Callable[..., Path], tmp_path: Path
):
    path = write_tiny_gguf()
    expected = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }
    converted = tmp_path / "converted"
    converted.mkdir()
    convert_gguf(path, converted)
    for source in (converted, path):
        weights = load_model(source, dtype=torch.float32).model.state_dict()
        layer = "model.layers.1."
        for name, value in (
            ("model.embed_tokens.weight", expected["token_embd.weight"]),
            (layer + "input_layernorm.weight", expected["blk.1.attn_norm.weight"]),
            (layer + "self_attn.q_proj.weight", _untangle(expected["blk.1.attn_q.weight"], 4)),
            (layer + "self_attn.k_proj.weight", _untangle(expected["blk.1.attn_k.weight"], 2)),
            (layer + "self_attn.v_proj.weight", expected["blk.1.attn_v.weight"]),
            (layer + "mlp.down_proj.weight", expected["blk.1.ffn_down.weight"]),
        ):
            assert weights[name].numpy().tobytes() == value.astype(np.float32).tobytes(), name


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("adds_eos", [False, True])
def test_tokenizer_adds_bos_and_eos_as_the_file_says(
    write_tiny_gguf: Callable[..., Path], tmp_path: Path, adds_bos: bool, adds_eos: bool
):
    converted = tmp_path / "converted"
    converted.mkdir()
    convert_gguf(write_tiny_gguf(adds_bos=adds_bos, adds_eos=adds_eos), converted)
    tokenizer = load_model(converted, dtype=torch.float32).tokenizer
    token_ids = tokenizer(TEXT).input_ids
    before, after = ["<s>"] * adds_bos, ["</s>"] * adds_eos
    assert tokenizer.convert_ids_to_tokens(token_ids) == [*before, *TEXT_TOKENS, *after]
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == TEXT


def test_loaded_model_is_ready_for_inference(write_tiny_gguf: Callable[..., Path]):
    path = write_tiny_gguf()
    loaded = load_model(path, dtype=torch.bfloat16, attn_implementation="eager")
    assert loaded.path == path
    assert not loaded.model.training
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "eager"
    assert loaded.max_positions == 256
    num_weights = sum(parameter.numel() for parameter in loaded.model.parameters())
    assert loaded.weights_bytes == 2 * num_weights


def test_directory_with_one_gguf_file_is_that_file(write_tiny_gguf: Callable[..., Path]):
    path = write_tiny_gguf()
    assert load_model(path.parent, dtype=torch.float32).path == path


def test_nothing_of_transformers_is_shown(
    write_tiny_gguf: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    converted = tmp_path / "converted"
    converted.mkdir()
    convert_gguf(write_tiny_gguf(), converted)
    load_model(converted, dtype=torch.float32)
    assert capfd.readouterr() == ("", "")


def test_missing_weights_are_never_made_up(write_tiny_gguf: Callable[..., Path]):
    path = write_tiny_gguf(without="blk.1.attn_v.weight")
    with pytest.raises(DamagedModelError, match=re.escape("model.layers.1.self_attn.v_proj")):
        load_model(path, dtype=torch.float32)


@pytest.mark.parametrize("num_bytes_kept", [0, 3, 100, 3000, 80_000])
def test_truncated_gguf_is_one_line(write_tiny_gguf: Callable[..., Path], num_bytes_kept: int):
    path = write_tiny_gguf()
    assert path.stat().st_size > num_bytes_kept
    path.write_bytes(path.read_bytes()[:num_bytes_kept])
    with pytest.raises(DamagedModelError) as caught:
        load_model(path, dtype=torch.float32)
    assert "\n" not in str(caught.value)
    assert "check the files" in str(caught.value)


def test_truncated_safetensors_is_one_line(write_tiny_gguf: Callable[..., Path], tmp_path: Path):
    converted = tmp_path / "converted"
    converted.mkdir()
    convert_gguf(write_tiny_gguf(), converted)
    weights = converted / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(DamagedModelError) as caught:
        load_model(converted, dtype=torch.float32)
    assert "\n" not in str(caught.value)


def test_what_is_no_model_is_refused(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).write_text("")
    for name, said in (
        (tmp_path / "notes.txt", "expected a .gguf file"),
        (tmp_path / "empty", "0 .gguf files"),
        (tmp_path / "two", "2 .gguf files"),
        (tmp_path / "absent", "not a file or directory"),
        ("absent.gguf", "not a file or directory"),
        ("", "is empty"),
        ("gemma3-270", "did you mean 'gemma3-270m'"),
    ):
        with pytest.raises(UnknownModelError, match=re.escape(said)):
            load_model(name, dtype=torch.float32)


def test_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch_bridge.models.load._is_hub_reachable", lambda name: False)
    with pytest.raises(ModelError, match="known short names: smollm2-135m") as caught:
        load_model("no-owner/no-model-of-this-name", dtype=torch.float32)
    assert "\n" not in str(caught.value)
