"""The models with a short name, as fetched: token IDs, generation, and loading from the cache."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
import torch

from torch_bridge.models.cache import verify_files
from torch_bridge.models.fetch import fetch_model
from torch_bridge.models.load import load_model
from torch_bridge.models.registry import find_source

pytestmark = [pytest.mark.models, pytest.mark.slow]

# Made with another, later release of transformers (5.24), whose GGUF tokenizers are complete.
EXPECTED_IDS = json.loads(Path(__file__).with_name("tokenizer_ids.json").read_text("utf-8"))
NAMES = ["smollm2-135m", "gemma3-270m"]


@pytest.mark.parametrize("name", NAMES)
def test_token_ids_are_the_models_own(name: str):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(fetch_model(name).directory)
    for case in EXPECTED_IDS:
        assert tokenizer(case["text"]).input_ids == case[name], case["text"]


@pytest.mark.parametrize("name", NAMES)
def test_cache_is_whole_and_names_its_source(name: str):
    fetch_model(name)
    manifest = verify_files(name)
    assert manifest.requirements == find_source(name).requirements
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(manifest.files)


@pytest.mark.parametrize(
    ("name", "num_full_layers", "num_layers"), [("smollm2-135m", 30, 30), ("gemma3-270m", 3, 18)]
)
def test_model_understands_text(name: str, num_full_layers: int, num_layers: int):
    loaded = load_model(name, dtype=torch.float32)
    config = loaded.model.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    assert (kinds.count("full_attention"), len(kinds)) == (num_full_layers, num_layers)
    text = "One, two, three, four, five, six, seven, eight, nine, ten."
    token_ids = loaded.tokenizer(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        loss = float(loaded.model(token_ids, labels=token_ids).loss)
    assert loss < 2  # Nats a token; about 11 for a model that knows nothing.
