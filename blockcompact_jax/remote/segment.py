"""Memory that the verifier writes and the engine's process reads in place.

A segment is an anonymous file of the kernel (memfd): it has no name in any file system, so whatever
happens to a process, its memory is gone with the last one that maps it. The reader opens it through
`/proc`, which only the same user on the same machine can do.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import SegmentError

_NAME_PREFIX = "blockcompact-"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, kw_only=True)
class RegionPlace:
    """Where a region lies.

    Attributes:
        offset_bytes: From the segment's beginning; a multiple of the page size.
        size_bytes: Its size.
    """

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class SegmentHandle:
    """What another process needs to open a segment.

    Attributes:
        pid: Process that has it open.
        fd: Its file descriptor there.
        name: Random name, which tells it from any other file.
        size_bytes: Size of the whole.
        regions: Where each region lies, by name.
    """

    pid: int
    fd: int
    name: str
    size_bytes: int
    regions: Mapping[str, RegionPlace]


class MemoryAllowance:
    """How much shared memory all segments of a process may have together.

    Attributes:
        limit_bytes: The most.
        used_bytes: In use now.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Books memory that is about to be allocated.

        Raises:
            SegmentError: There is not that much left.
        """
        available = min(self.limit_bytes - self.used_bytes, _available_bytes())
        if size_bytes > available:
            raise SegmentError(
                f"A sequence needs {size_bytes:,} more bytes of shared memory and "
                f"{max(available, 0):,} are left of {self.limit_bytes:,}. Finish other requests, "
                "prefill a shorter sequence, or start the server with a larger memory limit."
            )
        self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Books memory that was released."""
        self.used_bytes -= size_bytes


class SharedSegment:
    """A segment of this process. `region` allocates; `seal` fixes the size for good."""

    is_writable = True

    def __init__(self, allowance: MemoryAllowance) -> None:
        """Creates it, empty, readable and writable by this user alone."""
        self._allowance = allowance
        self._name = _NAME_PREFIX + secrets.token_hex(16)
        self._regions: dict[str, RegionPlace] = {}
        self._size_bytes = 0
        try:
            self._fd = os.memfd_create(self._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise SegmentError(
                f"Shared memory cannot be created: {error.strerror}. Close what holds memory or "
                "files open, and try again."
            ) from error
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        os.fchmod(self._fd, 0o600)

    def region(self, name: str, size_bytes: int) -> memoryview:
        """Allocates zeros; every page is really there, so that no later write can fail.

        Raises:
            SegmentError: There is no room.
        """
        offset = self._size_bytes
        num_new = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._allowance.take(num_new)
        self._size_bytes += num_new
        try:
            os.posix_fallocate(self._fd, offset, num_new)
            mapped = mmap.mmap(self._fd, size_bytes, offset=offset)
        except OSError as error:
            raise SegmentError(
                f"Shared memory is full: {size_bytes:,} bytes for `{name}` could not be allocated "
                f"({error.strerror}). Finish other requests or prefill a shorter sequence."
            ) from error
        self._regions[name] = RegionPlace(offset_bytes=offset, size_bytes=size_bytes)
        return memoryview(mapped)

    def seal(self) -> SegmentHandle:
        """Fixes the size, so that a reader's pages can never go away, and describes the segment."""
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        return SegmentHandle(
            pid=os.getpid(),
            fd=self._fd,
            name=self._name,
            size_bytes=self._size_bytes,
            regions=dict(self._regions),
        )

    def close(self) -> None:
        """Closes it; its memory goes when the last mapping does. A second call does nothing."""
        if not self._close_fd.alive:
            return
        self._close_fd()
        self._fd = -1
        self._allowance.give_back(self._size_bytes)


class OpenedSegment:
    """A segment of another process. Mapped pages stay valid after that process ended."""

    def __init__(self, handle: SegmentHandle, *, is_writable: bool = False) -> None:
        """Opens it.

        Args:
            handle: Where it is.
            is_writable: Whether to map it to write as well, as a rank does its pool.

        Raises:
            SegmentError: It cannot be reached, or is not the file that was described.
        """
        self._handle = handle
        self.is_writable = is_writable
        link = Path(f"/proc/{handle.pid}/fd/{handle.fd}")
        try:
            access = os.O_RDWR if is_writable else os.O_RDONLY
            self._fd = os.open(link, access | os.O_CLOEXEC)
            found = os.readlink(f"/proc/self/fd/{self._fd}")
        except OSError as error:
            raise SegmentError(
                f"The server's memory cannot be opened ({error.strerror}: {link}). Run both on the "
                "same machine, as the same user and in the same container."
            ) from error
        if found != f"/memfd:{handle.name} (deleted)":
            self.close()
            raise SegmentError(f"{link} is not the segment {handle.name!r}; shake hands again.")
        size_bytes = os.fstat(self._fd).st_size
        if size_bytes != handle.size_bytes:
            self.close()
            raise SegmentError(
                f"The server's memory has {size_bytes:,} bytes; expected {handle.size_bytes:,}."
            )

    def region(self, name: str, size_bytes: int) -> memoryview:
        """Maps a region.

        Raises:
            SegmentError: There is none of this name and size, or it lies outside of the segment.
        """
        place = self._handle.regions.get(name)
        if place is None or place.size_bytes != size_bytes:
            given = "is missing" if place is None else f"has {place.size_bytes:,} bytes"
            raise SegmentError(
                f"The server's region `{name}` {given}; expected {size_bytes:,} bytes. Install "
                "the same version on both sides."
            )
        if place.offset_bytes < 0 or place.offset_bytes + size_bytes > self._handle.size_bytes:
            raise SegmentError(
                f"The server's region `{name}` lies outside of its segment. Install the same "
                "version on both sides."
            )
        access = mmap.PROT_READ | (mmap.PROT_WRITE if self.is_writable else 0)
        mapped = mmap.mmap(self._fd, size_bytes, prot=access, offset=place.offset_bytes)
        return memoryview(mapped)

    def close(self) -> None:
        """Closes the file; mapped regions stay until nobody uses them."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


def _available_bytes() -> int:
    """Memory that this machine can still give; a page beyond it would kill the process."""
    facts = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kib = next(int(line.split()[1]) for line in facts if line.startswith("MemAvailable:"))
    return kib * 1024
