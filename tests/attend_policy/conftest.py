import pytest

pytest.importorskip("torch", reason="needs the [torch] extra: torch")
