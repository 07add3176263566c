"""Process: which one of which machine a rank is, as others see it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process.

    Args:
        pid: Its id.
        place: What processes share that see each other's ids.
    """

    pid: int
    place: str

    @classmethod
    def current(cls) -> Process:
        """This one."""
        return cls(pid=os.getpid(), place=_place())

    @property
    def is_gone(self) -> bool:
        """Whether it is known to have ended; of one in another place nothing is known."""
        return self.place == _place() and not _is_alive(self.pid)


def _place() -> str:
    # Two machines may have one name, and every container's first process lies in a namespace of the same number.
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    boot_id = boot.read_text(encoding="utf-8").strip() if boot.exists() else ""
    number = namespace.stat().st_ino if namespace.exists() else 0
    return f"{socket.gethostname()} {boot_id} {number}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:
        # Somebody else's, or no such file system here.
        return True
    return state != "Z"
