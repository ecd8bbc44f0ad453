"""A pytest plugin: vLLM's own tests with our plugin on and our block manager for full attention.

vLLM's source distribution has its tests. In its folder, in an environment with the wheel of the
same version and this project:

    PYTHONPATH=SCRIPTS python -m pytest -p vllm_own_tests --noconftest --local-model DIR \
        tests/v1/core/test_prefix_caching.py tests/v1/core/test_single_type_kv_cache_manager.py

Whatever model a test names, DIR (a Llama and its tokenizer) takes its place. Engines that tests
start have the attend policy with the smallest budget and run eagerly.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

BUDGET = "2b"
managers: list[Any] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the model's folder."""
    parser.addoption("--local-model", required=True, help="folder of a Llama and its tokenizer")


def pytest_configure(config: pytest.Config) -> None:
    """Puts our parts in the places of vLLM's."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    _use_our_manager()
    _use_model(config.getoption("--local-model"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how often our manager served: none would mean that nothing was tested."""
    terminalreporter.write_line(f"{len(managers)} block managers were ours")


def _use_our_manager() -> None:
    """Full attention is served by the manager of the retain policy, which is never told to drop."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from torch_bridge.vllm.requests import RetainedRequests
    from torch_bridge.vllm.retain import RetainedAttentionManager

    class Manager(RetainedAttentionManager):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Stock specifications name no engine, so there is none to meet a worker in.
            FullAttentionManager.__init__(self, *args, **kwargs)
            self._retained = RetainedRequests()
            managers.append(id(self))

    stock = KVCacheSpecRegistry.get_manager_class

    def get_manager_class(kvcache_spec: Any, role: str | None = None) -> Any:
        manager = stock(kvcache_spec, role)
        return Manager if manager is FullAttentionManager else manager

    KVCacheSpecRegistry.get_manager_class = staticmethod(get_manager_class)


def _use_model(folder: str) -> None:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    stock_config, stock_arguments = ModelConfig.__init__, EngineArgs.__post_init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["model"], kwargs["tokenizer"] = folder, folder
        stock_config(self, *args, **kwargs)

    def post_init(self: Any) -> None:
        self.model, self.tokenizer = folder, None
        self.enforce_eager, self.enable_prefix_caching = True, False
        self.block_size, self.max_model_len = 32, 1024
        self.additional_config = {"blockcompact": {"budget": BUDGET}}
        stock_arguments(self)

    ModelConfig.__init__ = init
    EngineArgs.__post_init__ = post_init
