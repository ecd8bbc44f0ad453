"""Writes the ledger's tables into docs/ledger.md and the C++ header, from what the ledger reads.

python scripts/ledger_tables.py          compare; ends with 1 if a file is out of date
python scripts/ledger_tables.py --write  write both
"""

import argparse
import sys
from pathlib import Path

import ledger_header
import ledger_page

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/ledger.md"
HEADER = ROOT / "custom_calls/include/blockcompact/ledger_tables.h"


def render() -> dict[Path, str]:
    """Returns what each file has to hold."""
    return {PAGE: ledger_page.fill(PAGE.read_text()), HEADER: ledger_header.render()}


def main() -> None:
    """Compares or writes both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write both files")
    arguments = parser.parse_args()
    stale = {path: text for path, text in render().items() if path.read_text() != text}
    if arguments.write:
        for path, text in stale.items():
            path.write_text(text)
    elif stale:
        names = " and ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"out of date: {names}; run: python scripts/ledger_tables.py --write")


if __name__ == "__main__":
    main()
