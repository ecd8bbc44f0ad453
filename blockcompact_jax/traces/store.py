"""The file of a trace: a NumPy archive with a JSON header, versioned and checked when read.

Members of the archive (`.npz`, uncompressed): `header`, the bytes of a JSON object; `layers`,
`scales`, `token_ids`, `query_positions`, `queries` and `keys`, as `AttentionTrace` has them.
bfloat16 is stored as the bits, uint16, which every NumPy reads.
"""

from __future__ import annotations

import json
import lzma
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any, cast

import numpy as np

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.strict_json import parse_json
from blockcompact_jax.traces.trace import TRACE_DTYPES, AnyNumpy, AttentionTrace, check_trace

SCHEMA = "blockcompact attention trace, version 1"
_ARRAYS = ("layers", "scales", "token_ids", "query_positions", "queries", "keys")
_DAMAGED = (
    *(ValueError, EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    RuntimeError,  # encrypted, or compressed in a way that is not known
)
"""What reading an archive raises that is none, or is damaged."""
_FACTS: dict[str, type] = {
    "model": str,
    "weights": str,
    "model_dtype": str,
    "dtype": str,
    "source": str,
    "num_context_tokens": int,
    "num_model_layers": int,
    "origin": dict,
}
"""What every header has, and as what."""


def write_trace(path: Path, trace: AttentionTrace) -> None:
    """Writes a trace; the file is there whole or not at all.

    Args:
        path: A file whose name ends in .npz; what it held is replaced.
        trace: What to write.

    Raises:
        CompactionError: If the name ends otherwise, or the trace is not sound.
        OSError: If the file cannot be written.
    """
    check_trace_name(path)
    check_trace(trace)
    header = {"schema": SCHEMA, **{name: getattr(trace, name) for name in _FACTS}}
    text = json.dumps(header, allow_nan=False).encode()
    arrays = {name: _as_stored(getattr(trace, name)) for name in _ARRAYS}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            save: Any = np.savez  # its stub takes no arrays by keyword
            save(file, header=np.frombuffer(text, np.uint8), **arrays)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def check_trace_name(path: Path) -> None:
    """Refuses a name that no trace has.

    Raises:
        CompactionError: If it does not end in .npz.
    """
    if path.suffix != ".npz":
        raise CompactionError(
            f"`trace` is {str(path)!r}; give a file whose name ends in .npz, as `blockcompact "
            "record` writes it."
        )


def read_trace(path: Path) -> AttentionTrace:
    """Reads a trace and checks all of it.

    Raises:
        CompactionError: If the file cannot be read, is no trace or one of another version, or its
            parts do not fit together.
    """
    check_trace_name(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {
                name.removesuffix(".npy"): _member(archive, name) for name in archive.namelist()
            }
    except OSError as error:
        raise CompactionError(
            f"`trace` is {str(path)!r}, which cannot be read ({error.strerror or error}); give a "
            "file of `blockcompact record`."
        ) from error
    except _DAMAGED as error:
        raise CompactionError(
            f"`trace` is {str(path)!r}, which is no NumPy archive ({error}); record it again with "
            "`blockcompact record`."
        ) from error
    header = _header(path, members)
    facts = {name: _fact(path, header, name) for name in _FACTS}
    missing = [name for name in _ARRAYS if name not in members]
    if missing:
        raise CompactionError(
            f"`trace` is {str(path)!r}, which has no `{missing[0]}`; record it again."
        )
    arrays: dict[str, Any] = {name: members[name] for name in _ARRAYS}
    if facts["dtype"] == "bfloat16":
        for name in ("queries", "keys"):
            arrays[name] = _from_bits(path, name, arrays[name])
    trace = AttentionTrace(**facts, **arrays)
    try:
        check_trace(trace)
    except CompactionError as error:
        raise CompactionError(f"`trace` is {str(path)!r}, where {error}") from error
    return trace


def _as_stored(array: AnyNumpy) -> AnyNumpy:
    return array.view(np.uint16) if array.dtype == TRACE_DTYPES["bfloat16"] else array


def _member(archive: zipfile.ZipFile, name: str) -> AnyNumpy:
    with archive.open(name) as file:
        return cast(AnyNumpy, np.lib.format.read_array(file, allow_pickle=False))


def _from_bits(path: Path, name: str, array: AnyNumpy) -> AnyNumpy:
    if array.dtype != np.uint16:
        raise CompactionError(
            f"`trace` is {str(path)!r}, whose `{name}` is {array.dtype}; expected the bits of "
            "bfloat16, uint16. Record it again."
        )
    return array.view(TRACE_DTYPES["bfloat16"])


def _header(path: Path, members: dict[str, AnyNumpy]) -> dict[str, Any]:
    try:
        header: Any = parse_json(members["header"].tobytes().decode("utf-8"))
    except (KeyError, ValueError) as error:
        raise CompactionError(
            f"`trace` is {str(path)!r}, which has no header of a trace; give a file that "
            "`blockcompact record` wrote."
        ) from error
    schema = cast(dict[str, Any], header).get("schema") if isinstance(header, dict) else None
    if schema != SCHEMA:
        raise CompactionError(
            f"`trace` is {str(path)!r}, whose `schema` is {schema!r}; expected {SCHEMA!r}. Record "
            "it again."
        )
    return cast(dict[str, Any], header)


def _fact(path: Path, header: dict[str, Any], name: str) -> Any:
    if not isinstance(header.get(name), _FACTS[name]):
        raise CompactionError(
            f"`trace` is {str(path)!r}, where `{name}` of the header is {header.get(name)!r}; "
            f"expected {_FACTS[name].__name__}. Record it again."
        )
    return header[name]
