"""Time and peak memory of a process and its children, sampled from outside.

The kernel can drop cached pages of files, but not anonymous memory. Resident memory is both together.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

SAMPLE_INTERVAL_S = 0.005
# Gauges cost more than a sample of memory, so they are read less often. On a busy machine samples come late: so this is
# a time, and not a number of samples.
_GAUGE_INTERVAL_S = 0.1
# Names of the lines of /proc/PID/status.
ANONYMOUS, RESIDENT = "RssAnon", "VmRSS"
_STATE = "State"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Time and peaks of memory of a process that has ended."""

    exit_code: int  # exit code; minus the signal's number if a signal ended it
    wall_s: float
    cpu_s: float
    peak_anonymous_bytes: int  # largest sample of anonymous memory
    peak_resident_bytes: int  # peak of resident memory, counted by the kernel
    peaks: Mapping[str, int]  # peaks of the gauges, by name


def watch(
    words: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    gauges: Mapping[str, Callable[[], int]] = MappingProxyType({}),
    with_errors: bool = True,
    output: Path = Path(os.devnull),
) -> Watched:
    """Run a command, and sample the memory of its processes until it ends; its stdout goes to `output`.

    Without an `environment` it has that of this process. `gauges` are other quantities to watch, such as a folder's
    size: functions that are read ten times per second, and once at the end. `with_errors` leaves it its stderr.
    """
    began_s = time.monotonic()
    with (
        output.open("wb") as stdout,
        subprocess.Popen(
            list(words),
            stdout=stdout,
            stderr=None if with_errors else subprocess.DEVNULL,
            env=None if environment is None else dict(environment),
        ) as process,
    ):
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
        # wait4, which gives the usage, has ended the wait: Popen must not wait again.
        process.returncode = os.waitstatus_to_exitcode(status)
    return Watched(
        exit_code=process.returncode,
        wall_s=time.monotonic() - began_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_anonymous_bytes=peaks.pop(ANONYMOUS),
        peak_resident_bytes=usage.ru_maxrss * 1024,
        peaks=MappingProxyType(peaks),
    )


def watch_package(package: str, *words: str, expected: Collection[int] = (0,)) -> Watched:
    """Run the program of one of this repository's packages, as `python -m PACKAGE WORDS`, and watch it.

    Raises:
        AssertionError: It ends with another exit code than those expected.
    """
    watched = watch([sys.executable, "-m", package, *words], environment=package_environment())
    assert watched.exit_code in expected, f"{package} {' '.join(words)} ended with {watched.exit_code}"
    return watched


def package_environment() -> dict[str, str]:
    """Return this process's variables for one that imports this repository's packages."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}


def memory_bytes(status: str, kind: str = ANONYMOUS) -> int:
    """Read the memory of one kind from the text of `/proc/PID/status`; 0 if the process has ended."""
    return 1024 * int(_fields(status).get(kind, "0 kB").split()[0])


def tree_bytes(folder: Path, *, without: tuple[Path, ...] = ()) -> int:
    """Measure the disk space of the files in a folder except the folders `without`; files may vanish meanwhile."""
    total = 0
    for parent, folders, names in os.walk(folder):
        # os.walk goes only into the folders that stay in its list.
        folders[:] = [name for name in folders if Path(parent) / name not in without]
        for name in names:
            try:
                total += (Path(parent) / name).lstat().st_blocks * 512
            except OSError:
                continue
    return total


def _sample(pid: int, gauges: Mapping[str, Callable[[], int]], peaks: dict[str, int]) -> None:
    """Raise the peaks until the process ends."""
    gauge_due_s = time.monotonic()
    while True:
        status = _read_status(pid)
        # Z is a zombie: ended, but not yet waited for.
        has_ended = _fields(status).get(_STATE, "Z").startswith("Z")
        of_children = sum(memory_bytes(_read_status(child)) for child in _descendants(pid))
        held_bytes = memory_bytes(status) + of_children
        peaks[ANONYMOUS] = max(peaks[ANONYMOUS], held_bytes)
        if has_ended or time.monotonic() >= gauge_due_s:
            gauge_due_s = time.monotonic() + _GAUGE_INTERVAL_S
            for name, gauge in gauges.items():
                peaks[name] = max(peaks[name], gauge())
        if has_ended:
            return
        time.sleep(SAMPLE_INTERVAL_S)


def _descendants(pid: int) -> Iterator[int]:
    """Yield the children that a process started from its main thread, and their children."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    except OSError:
        return
    for child in map(int, children):
        yield child
        yield from _descendants(child)


def _read_status(pid: int) -> str:
    """Read `/proc/PID/status`; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return ""


def _fields(status: str) -> dict[str, str]:
    lines = (line.partition(":") for line in status.splitlines())
    return {name: value.strip() for name, _, value in lines}
