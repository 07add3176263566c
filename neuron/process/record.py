"""StatusRecord: what a process is doing, in memory that another process reads, after its death too.

A memory file without a name. It begins with the status; behind it stands the Python stack of a crash.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from dataclasses import asdict, dataclass

# The longest that one pass through a layer may take: a compiler may need an hour for one.
LAYER_TIMEOUT_S = 7200.0
_SIZE = 1 << 18
_MOST_STACK = 1 << 16
# Paths in it may be long; in JSON a character takes up to 12 bytes.
_MOST_TEXT = 8000
# Length and CRC-32 of the JSON behind: what is half written is not taken for a status.
_HEADER = struct.Struct("<II")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """State of a process.

    Args:
        activity: As in "running layer 3 of target port.py:Layer"; empty while mm2 is at work between layers.
        is_in_port: Whether that is code of the port's; else mm2 works on a layer, or waits for other ranks.
        last_activity: What came before.
        limited_since_s: When the stretch began that the time limit counts, by the system's monotonic clock; None
            where nothing is limited.
        limit_s: The longest such stretch, in seconds; 0 for any.
        exit_code: The one that mm2 itself chose; None before its end.
        num_output_bytes: How much of the output that was set aside is the command's own.
    """

    activity: str = ""
    is_in_port: bool = False
    last_activity: str = ""
    limited_since_s: float | None = None
    limit_s: float = LAYER_TIMEOUT_S
    exit_code: int | None = None
    num_output_bytes: int = 0

    def overdue(self, now_s: float, *, resumed_s: float = 0.0) -> bool:
        """Decide whether the limit is passed.

        Args:
            now_s: The time of the monotonic clock.
            resumed_s: When the process went on after it was suspended: the time before does not count.
        """
        if self.limited_since_s is None or self.exit_code is not None:
            return False
        return 0 < self.limit_s < now_s - max(self.limited_since_s, resumed_s)


class StatusRecord:
    """The shared memory of one process's status; made by `create` or `attach`.

    Args:
        descriptor: Its file, which the record owns from now on.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        # It outlives the descriptor, which a port may close.
        self._memory = mmap.mmap(descriptor, _SIZE)
        self._latest = Status()

    @classmethod
    def create(cls) -> StatusRecord:
        """A new one, which says nothing yet."""
        descriptor = os.memfd_create("mm2-status")
        os.ftruncate(descriptor, _SIZE)
        # What is written through the file comes behind the status.
        os.lseek(descriptor, _SIZE, os.SEEK_SET)
        return cls(descriptor)

    @classmethod
    def attach(cls, descriptor: int) -> StatusRecord:
        """The one that another process made and passed on."""
        os.set_inheritable(descriptor, False)
        return cls(descriptor)

    def write(self, status: Status) -> None:
        """Replace the status."""
        values = asdict(status)
        for name in ("activity", "last_activity"):
            values[name] = values[name][:_MOST_TEXT]
        text = json.dumps(values).encode()
        self._memory[: _HEADER.size + len(text)] = _HEADER.pack(len(text), zlib.crc32(text)) + text

    def read(self) -> Status:
        """The status; the one read before where it is being written right now."""
        length, checksum = _HEADER.unpack(self._memory[: _HEADER.size])
        text = self._memory[_HEADER.size : _HEADER.size + min(length, _SIZE)]
        if text and zlib.crc32(text) == checksum:
            self._latest = Status(**json.loads(text))
        return self._latest

    def read_stack(self) -> str:
        """Return what faulthandler wrote of the process's Python stack; empty where it wrote nothing."""
        return os.pread(self.descriptor, _MOST_STACK, _SIZE).decode(errors="replace")

    def close(self) -> None:
        """Free it in this process."""
        self._memory.close()
        os.close(self.descriptor)
