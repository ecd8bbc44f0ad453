"""The remote tests need both optional halves."""

import pytest

pytest.importorskip("fastapi", reason="needs the [remote] extra: fastapi")
pytest.importorskip("httpx", reason="needs the [dev] extra: httpx")
pytest.importorskip("torch", reason="needs the [models] extra: torch")
pytest.importorskip("transformers", reason="needs the [models] extra: transformers")
