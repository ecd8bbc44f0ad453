"""No room in shared memory or on the disk: a clear error, and nothing stays behind."""

import errno
import os

import pytest

from blockcompact_jax.remote.access import create_or_read_token
from blockcompact_jax.remote.errors import SegmentError
from blockcompact_jax.remote.segment import MemoryAllowance, OpenedSegment, SharedSegment


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_memory_that_runs_out_within_a_segment_is_given_back(monkeypatch):
    """COM-8: the kernel refuses the second region; closing returns all that was booked."""
    allowance = MemoryAllowance(1 << 20)
    segment = SharedSegment(allowance)
    segment.region("packed", 4096)
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(SegmentError, match=r"Shared memory is full: 8,192 bytes for `newest`"):
        segment.region("newest", 8192)
    segment.close()
    assert allowance.used_bytes == 0


def test_memory_that_cannot_be_created_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(os, "memfd_create", no_space)
    with pytest.raises(SegmentError, match="cannot be created: No space left"):
        SharedSegment(MemoryAllowance(1 << 20))


def test_the_allowance_is_refused_before_anything_is_allocated():
    allowance = MemoryAllowance(8192)
    segment = SharedSegment(allowance)
    with pytest.raises(SegmentError, match="needs 12,288 more bytes"):
        segment.region("packed", 12_288)
    assert allowance.used_bytes == 0
    segment.close()


def test_a_full_disk_leaves_no_half_token(tmp_path, monkeypatch):
    path = tmp_path / "token"
    real = os.fdopen

    def full(descriptor, *_, **__):
        os.close(descriptor)
        return real(os.open("/dev/full", os.O_WRONLY), "w")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match="No space left"):
        create_or_read_token(path)
    assert not path.exists()


def test_a_reader_may_write_only_where_it_was_asked_to():
    """A rank maps its pool to write; everybody else reads."""
    segment = SharedSegment(MemoryAllowance(1 << 20))
    segment.region("resident", 4096)
    handle = segment.seal()
    reader, writer = OpenedSegment(handle), OpenedSegment(handle, is_writable=True)
    assert reader.region("resident", 4096).readonly
    memory = writer.region("resident", 4096)
    memory[0] = 7
    assert reader.region("resident", 4096)[0] == 7
    for each in (reader, writer, segment):
        each.close()
