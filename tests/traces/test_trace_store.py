"""The file of a trace: what is written is read, and anything else is refused by name."""

import json
import zipfile

import numpy as np
import pytest

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.traces.store import SCHEMA, read_trace, write_trace
from blockcompact_jax.traces.trace import AttentionTrace, check_trace

from . import trace_cases


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trace_is_read_as_it_was_written(tmp_path, dtype):
    path = tmp_path / "folder" / "t.npz"
    given = trace_cases.parts(dtype=dtype)
    write_trace(path, AttentionTrace(**given))
    found = read_trace(path)
    for name, value in given.items():
        if isinstance(value, np.ndarray):
            assert getattr(found, name).dtype == value.dtype
            assert getattr(found, name).tobytes() == value.tobytes(), name
        else:
            assert getattr(found, name) == value
    assert [each.name for each in path.parent.iterdir()] == ["t.npz"]
    assert path.stat().st_size < found.nbytes + 8192
    assert found.geometry(8).full_layers == (1, 4)


def test_the_file_is_one_that_numpy_alone_reads(tmp_path):
    """The format is documented: a header of JSON, and plain arrays."""
    path = tmp_path / "t.npz"
    write_trace(path, AttentionTrace(**trace_cases.parts(dtype="bfloat16")))
    with np.load(path, allow_pickle=False) as archive:
        header = json.loads(archive["header"].tobytes())
        bits = archive["keys"]
    assert header["schema"] == SCHEMA
    assert (header["model"], header["dtype"]) == ("tiny", "bfloat16")
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    expected = trace_cases.parts(dtype="bfloat16")["keys"].astype(np.float32)
    np.testing.assert_array_equal(values, expected)


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "t.npz"
    write_trace(path, AttentionTrace(**trace_cases.parts()))
    before = path.read_bytes()

    def fail(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="No space"):
        write_trace(path, AttentionTrace(**trace_cases.parts(forced=3)))
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float16"}, "`dtype` of the trace is 'float16'"),
        ({"num_context_tokens": 120}, "`num_context_tokens` of the trace is 120 of 120"),
        ({"num_context_tokens": 119}, None),
        ({"num_context_tokens": 50}, "has 38 of 38 after the context"),
        ({"num_model_layers": 4}, r"`layers` of the trace is \[1, 4\]"),
        ({"layers": np.array([4, 1], np.int32)}, r"`layers` of the trace is \[4, 1\]"),
        ({"layers": np.array([1, 2, 3], np.int32)}, "3 layers, 2 scales.* do not fit"),
        ({"scales": np.array([0, 1], np.float32)}, "not positive"),
        ({"token_ids": np.zeros(120, np.int64)}, "`token_ids` of the trace is int64"),
        ({"query_positions": np.arange(90, 128, dtype=np.int32)}, r"expected ascending .*0 … 119"),
        ({"keys": np.zeros((2, 3, 120, 8), np.float32)}, "do not fit"),
        ({"queries": np.zeros((2, 4, 38, 8), np.float64)}, "`queries` of the trace is float64"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, changes, said):
    trace = AttentionTrace(**{**trace_cases.parts(), **changes})
    if said is None:
        check_trace(trace)
        return
    with pytest.raises(CompactionError, match=said):
        write_trace(tmp_path / "t.npz", trace)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "place", "said"),
    [
        ("keys", (1, 0, 33, 2), "`keys` .* layer 4 at token position 33"),
        ("queries", (0, 3, 37, 7), "`queries` .* layer 1 at token position 119"),
    ],
)
def test_SEL_4_a_number_that_is_not_finite_is_named(name, place, said):
    """SEL-4: already the trace refuses it, by layer and token position."""
    given = trace_cases.parts(dtype="bfloat16")
    given[name][place] = np.nan
    with pytest.raises(CompactionError, match=said):
        check_trace(AttentionTrace(**given))


def rewritten(path, change):
    with np.load(path) as archive:
        members = {name: archive[name] for name in archive.files}
    header = json.loads(members["header"].tobytes())
    change(header, members)
    if "header" in members:
        members["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(path, **members)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda header, _: header.update(schema="other, version 2"), "`schema` is 'other, version"),
        (lambda header, _: header.pop("weights"), "`weights` of the header is None"),
        (lambda header, _: header.update(num_context_tokens="9"), "expected int"),
        (lambda _, members: members.pop("keys"), "has no `keys`"),
        (lambda _, members: members.pop("header"), "no header of a trace"),
        (lambda header, _: header.update(dtype="bfloat16"), "expected the bits of bfloat16"),
        (lambda header, _: header.update(num_context_tokens=1), "where `query_positions`"),
    ],
)
def test_a_changed_file_is_refused_by_name(tmp_path, change, said):
    path = tmp_path / "t.npz"
    write_trace(path, AttentionTrace(**trace_cases.parts()))
    rewritten(path, change)
    with pytest.raises(CompactionError, match=said) as refused:
        read_trace(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY", b"{}"])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "t.npz"
    path.write_bytes(content)
    with pytest.raises(CompactionError, match="no NumPy archive"):
        read_trace(path)
    with pytest.raises(CompactionError, match="cannot be read"):
        read_trace(tmp_path / "absent.npz")
    with pytest.raises(CompactionError, match=r"ends in \.npz"):
        read_trace(tmp_path / "t.json")


def test_a_cut_off_file_is_refused(tmp_path):
    path = tmp_path / "t.npz"
    write_trace(path, AttentionTrace(**trace_cases.parts()))
    path.write_bytes(path.read_bytes()[:-700])
    with pytest.raises(CompactionError, match="no NumPy archive"):
        read_trace(path)


def encrypt(content):
    """Sets the flag "encrypted" of the first member, in its header and in the directory."""
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + place] |= 1


def compress_otherwise(content):
    """Says a compression that nobody knows."""
    for signature, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        content[content.index(signature) + place] = 99


def damage(content):
    """Overwrites the beginning of the first member's compressed bytes."""
    name_length, extra_length = content[26], content[28]
    begin = 30 + name_length + extra_length
    content[begin : begin + 40] = b"\xff" * 40


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("change", [encrypt, compress_otherwise, damage])
def test_an_archive_that_cannot_be_unpacked_is_refused(tmp_path, change, compression):
    """Other tools repack archives, and bytes on disk rot."""
    given = tmp_path / "given.npz"
    write_trace(given, AttentionTrace(**trace_cases.parts()))
    path = tmp_path / "t.npz"
    with zipfile.ZipFile(given) as source, zipfile.ZipFile(path, "w", compression) as packed:
        for name in source.namelist():
            packed.writestr(name, source.read(name))
    assert read_trace(path).model == "tiny"
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    with pytest.raises(CompactionError, match=r"`trace` is .*t\.npz'"):
        read_trace(path)
