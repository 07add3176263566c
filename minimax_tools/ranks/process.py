"""Process: a rank's process, as the other ranks see it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process."""

    pid: int  # process id
    place: str  # machine, boot and pid namespace. Only processes of the same place see each other's ids.

    @classmethod
    def current(cls) -> Process:
        """Describe the calling process."""
        return cls(pid=os.getpid(), place=_place())

    @property
    def is_gone(self) -> bool:
        """True if the process has ended. Always False for a process of another place, which cannot be seen."""
        return self.place == _place() and not _is_alive(self.pid)


def _place() -> str:
    # Two machines may have the same name, and namespaces of two machines the same number: so name all three.
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    boot_id = boot.read_text(encoding="utf-8").strip() if boot.exists() else ""
    number = namespace.stat().st_ino if namespace.exists() else 0
    return f"{socket.gethostname()} {boot_id} {number}"


def read_state(pid: int) -> str | None:
    """Return a process's state as the kernel names it, such as R, S, T (stopped) or Z; None if it cannot be seen."""
    try:
        # The state stands behind the program's name, which is in parentheses and may hold spaces.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return None


def _is_alive(pid: int) -> bool:
    try:
        # Signal 0 does nothing but fail if the process is gone.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # Another user's process.
        return True
    # A zombie has ended, though its parent has not yet asked for its exit code. Without /proc nothing tells.
    return read_state(pid) != "Z"
