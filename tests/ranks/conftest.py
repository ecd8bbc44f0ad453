"""The messages between engine and ranks need the optional half."""

import pytest

pytest.importorskip("pydantic", reason="needs the [remote] extra: pydantic")
