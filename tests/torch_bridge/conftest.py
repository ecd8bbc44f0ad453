"""Tiny random models of four families: three with full attention only, one hybrid."""

import pytest

torch = pytest.importorskip("torch", reason="needs the [models] extra: torch")
transformers = pytest.importorskip("transformers", reason="needs the [models] extra: transformers")


@pytest.fixture(scope="session")
def llama():
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=97,
        max_position_embeddings=1024,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def gemma():
    torch.manual_seed(2)
    config = transformers.Gemma3TextConfig(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=97,
        max_position_embeddings=1024,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=32,
    )
    return transformers.Gemma3ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def qwen():
    """Normalizes queries and keys before rotating them."""
    torch.manual_seed(4)
    config = transformers.Qwen3Config(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=97,
        max_position_embeddings=1024,
    )
    return transformers.Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def mistral():
    """Every query head has its own keys."""
    torch.manual_seed(5)
    config = transformers.MistralConfig(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=97,
        max_position_embeddings=1024,
        sliding_window=None,
    )
    return transformers.MistralForCausalLM(config).eval()


@pytest.fixture(params=["llama", "gemma", "qwen", "mistral"])
def family(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["llama", "gemma"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def session(model):
    from sessions import make_session

    made = make_session(model)
    yield made
    made.close()


@pytest.fixture
def token_ids():
    return torch.randint(0, 97, (260,), generator=torch.Generator().manual_seed(3)).tolist()
