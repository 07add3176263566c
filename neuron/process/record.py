"""Status record: the status of a process, in memory that another process can read even after a crash.

The memory is an unnamed memory file. The status comes first, then the Python stack that faulthandler wrote.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from dataclasses import asdict, dataclass

# Longest time for one pass through a layer, two hours: compiling one may take an hour.
LAYER_TIMEOUT_S = 7200.0
# Room for two texts of `_MAX_TEXT` characters, of up to 12 bytes each in JSON (two \uXXXX), and the rest of the status.
_STATUS_BYTES = 1 << 18
_MAX_TEXT = 8000
_MAX_STACK_BYTES = 1 << 16
# Length and CRC-32 of the JSON that follows: a half-written status does not match them.
_HEADER = struct.Struct("<II")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Status of a process."""

    activity: str = ""  # such as "running layer 3 of port port.py:Layer"; empty between layers
    is_in_port: bool = False  # True while the port's code runs; else mm2 works, or waits for other ranks
    last_activity: str = ""  # the activity that ended last
    limited_since_s: float | None = None  # monotonic time at which the limit began to count, if one counts
    limit_s: float = LAYER_TIMEOUT_S  # the time limit, in seconds; 0 for no limit
    exit_code: int | None = None  # the exit code that mm2 itself chose; None before it exits
    num_output_bytes: int = 0  # size of the command's own standard output, if the supervisor holds it back

    def is_overdue(self, now_s: float, *, resumed_s: float = 0.0) -> bool:
        """Decide whether the time limit has passed, by the monotonic clock.

        Time before `resumed_s`, when the process continued after a suspension, does not count.
        """
        if self.limit_s == 0 or self.limited_since_s is None or self.exit_code is not None:
            return False
        return now_s - max(self.limited_since_s, resumed_s) > self.limit_s


class StatusRecord:
    """Shared memory with a process's status, from `create` or `attach`. It owns the memory file's descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        # The mapping outlives the descriptor, which a port may close.
        self._memory = mmap.mmap(descriptor, _STATUS_BYTES)
        self._last_read = Status()

    @classmethod
    def create(cls) -> StatusRecord:
        """Create an empty record."""
        descriptor = os.memfd_create("mm2-status")
        os.ftruncate(descriptor, _STATUS_BYTES)
        # faulthandler writes at the descriptor's position: so the stack comes after the status.
        os.lseek(descriptor, _STATUS_BYTES, os.SEEK_SET)
        return cls(descriptor)

    @classmethod
    def attach(cls, descriptor: int) -> StatusRecord:
        """Open the record that another process created and passed on."""
        os.set_inheritable(descriptor, False)  # so that processes that a port starts do not get it
        return cls(descriptor)

    def write(self, status: Status) -> None:
        """Replace the status."""
        values = asdict(status)
        for name in ("activity", "last_activity"):
            values[name] = values[name][:_MAX_TEXT]
        text = json.dumps(values).encode()
        self._memory[: _HEADER.size + len(text)] = _HEADER.pack(len(text), zlib.crc32(text)) + text

    def read(self) -> Status:
        """Return the status; if it is half-written, the status read before."""
        length, checksum = _HEADER.unpack(self._memory[: _HEADER.size])
        text = self._memory[_HEADER.size : _HEADER.size + min(length, _STATUS_BYTES)]
        if text and zlib.crc32(text) == checksum:
            self._last_read = Status(**json.loads(text))
        return self._last_read

    def read_stack(self) -> str:
        """Return the process's Python stack; empty if faulthandler wrote none."""
        return os.pread(self.descriptor, _MAX_STACK_BYTES, _STATUS_BYTES).decode(errors="replace")

    def close(self) -> None:
        """Free the memory in this process."""
        self._memory.close()
        os.close(self.descriptor)
