"""Time and peak memory of a process and its children, sampled from outside.

Anonymous memory cannot be dropped, unlike cached pages of files; resident memory is both.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

SAMPLE_INTERVAL_S = 0.005
# Gauges cost more than a sample of memory. Samples come late on a busy machine, so this is a time, not a count.
_GAUGE_INTERVAL_S = 0.1
# Names of the lines of /proc/PID/status.
ANONYMOUS, RESIDENT = "RssAnon", "VmRSS"
_STATE = "State"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A process that has ended.

    Args:
        wall_s: Seconds from start to end.
        cpu_s: Seconds of all cores.
        peak_anonymous_bytes: Largest sample of anonymous memory.
        peak_resident_bytes: Peak of resident memory, counted by the kernel.
        peaks: Peaks of other gauges, by name.
    """

    exit_code: int
    wall_s: float
    cpu_s: float
    peak_anonymous_bytes: int
    peak_resident_bytes: int
    peaks: Mapping[str, int]


def watch(
    words: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    gauges: Mapping[str, Callable[[], int]] = MappingProxyType({}),
) -> Watched:
    """Run a command and sample its memory until it ends, that of its children included; its stdout is dropped.

    Args:
        words: The command.
        environment: Environment of the process; None for this one's.
        gauges: Functions that are read ten times per second, and once at the end.
    """
    began_s = time.monotonic()
    with subprocess.Popen(
        list(words), stdout=subprocess.DEVNULL, env=None if environment is None else dict(environment)
    ) as process:
        peaks = {ANONYMOUS: 0} | dict.fromkeys(gauges, 0)
        sampler = threading.Thread(target=_sample, args=(process.pid, gauges, peaks))
        sampler.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            raise
        finally:
            sampler.join()
        # Popen must not wait again: wait4 was needed for the usage.
        process.returncode = os.waitstatus_to_exitcode(status)
    return Watched(
        exit_code=process.returncode,
        wall_s=time.monotonic() - began_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_anonymous_bytes=peaks.pop(ANONYMOUS),
        peak_resident_bytes=usage.ru_maxrss * 1024,
        peaks=MappingProxyType(peaks),
    )


def memory_bytes(status: str, kind: str = ANONYMOUS) -> int:
    """Read the memory of one kind in a `/proc/PID/status`; 0 where the process has ended."""
    return 1024 * int(_fields(status).get(kind, "0 kB").split()[0])


def tree_bytes(folder: Path, *, without: tuple[Path, ...] = ()) -> int:
    """Measure the disk space of the files in a folder but for the folders `without`; it may change meanwhile."""
    total = 0
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if Path(parent) / name not in without]
        for name in names:
            try:
                total += (Path(parent) / name).lstat().st_blocks * 512
            except OSError:
                continue
    return total


def _sample(pid: int, gauges: Mapping[str, Callable[[], int]], peaks: dict[str, int]) -> None:
    gauge_due_s = time.monotonic()
    while True:
        status = _read_status(pid)
        has_ended = _fields(status).get(_STATE, "Z").startswith("Z")
        held_bytes = memory_bytes(status) + sum(memory_bytes(_read_status(child)) for child in _family(pid))
        peaks[ANONYMOUS] = max(peaks[ANONYMOUS], held_bytes)
        if has_ended or time.monotonic() >= gauge_due_s:
            gauge_due_s = time.monotonic() + _GAUGE_INTERVAL_S
            for name, gauge in gauges.items():
                peaks[name] = max(peaks[name], gauge())
        if has_ended:
            return
        time.sleep(SAMPLE_INTERVAL_S)


def _family(pid: int) -> Iterator[int]:
    """Yield the children of a process, and theirs."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    except OSError:
        return
    for child in map(int, children):
        yield child
        yield from _family(child)


def _read_status(pid: int) -> str:
    """Read `/proc/PID/status`; empty where the process is gone."""
    try:
        return Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return ""


def _fields(status: str) -> dict[str, str]:
    lines = (line.partition(":") for line in status.splitlines())
    return {name: value.strip() for name, _, value in lines}
