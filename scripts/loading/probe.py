"""The main function of a probe: a measurement in a process of its own, started by `loading/bench.py`.

    python -m loading.probe MODULE:FUNCTION ARGUMENTS REPORT

MODULE imports everything that the function needs; the memory held after that is the baseline. The function is called
with ARGUMENTS, a JSON object. The file REPORT gets time, I/O and result as JSON, and what the process held before the
call: `bench.py` samples the peaks from outside, and subtracts that.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path

from peaks import ANONYMOUS, RESIDENT, memory_bytes, tree_bytes


def main() -> None:
    """Import, measure, report."""
    began_s = time.perf_counter()
    place, arguments, report = sys.argv[1:]
    module_name, _, function_name = place.partition(":")
    function = getattr(importlib.import_module(module_name), function_name)
    gc.collect()
    import_s = time.perf_counter() - began_s
    baseline = Path("/proc/self/status").read_text(encoding="utf-8")
    # Importing torch leaves a temporary file until the process ends: it is no disk space of the function's.
    temporary_bytes = tree_bytes(Path(tempfile.gettempdir()))
    io_before, imported = _read_io(), set(sys.modules)
    began_s = time.perf_counter()
    values = function(**json.loads(arguments))
    seconds = time.perf_counter() - began_s
    record = {
        "import_s": import_s,
        "seconds": seconds,
        "baseline_bytes": memory_bytes(baseline, ANONYMOUS),
        "baseline_resident_bytes": memory_bytes(baseline, RESIDENT),
        "temporary_bytes": temporary_bytes,
        "io": {name: count - io_before[name] for name, count in _read_io().items()},
        "late_imports": sorted(set(sys.modules) - imported),  # should be none: their time was measured
        "values": values,
    }
    Path(report).write_text(json.dumps(record), encoding="utf-8")


def _read_io() -> dict[str, int]:
    """Read the kernel's counts of this process: `rchar` and `wchar` of files, `read_bytes` of disks."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return {name: int(count) for name, _, count in (line.partition(": ") for line in lines)}


if __name__ == "__main__":
    main()
