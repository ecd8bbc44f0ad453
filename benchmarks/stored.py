"""How a benchmark stores its results: one JSON file that says on what machine it ran, and of what.

Every script but those that add to their own file writes it so, and the monitor's page reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blockcompact_jax.provenance import machine, package_versions


def store(
    path: Path,
    results: Iterable[dict[str, Any]],
    *,
    machine_facts: dict[str, Any] | None = None,
    **facts: Any,
) -> None:
    """Writes results, and the folders to them.

    Args:
        path: The file; what it held is replaced.
        results: One object a row, samples included.
        machine_facts: What matters of the machine beside its processor and their number.
        **facts: What holds for all rows, such as settings.
    """
    document = {
        "machine": {**machine(), **(machine_facts or {})},
        "versions": package_versions(),
        **facts,
        "results": list(results),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
