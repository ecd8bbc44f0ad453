"""The plugin that vLLM loads in every one of its processes (entry point `vllm.general_plugins`)."""

# pyright: reportMissingImports=false


def register() -> None:
    """Puts our CPU attention backend in the place of the stock one, which it extends.

    Without `additional_config={"blockcompact": {...}}` it behaves as the stock backend.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(
        AttentionBackendEnum.CPU_ATTN, "torch_bridge.vllm.backend.BlockCompactAttentionBackend"
    )
