"""Size of the report page of a whole model, and the time that it takes to write and to draw.

A model of 62 layers of true width, with narrow experts, is captured at all sites over a row of 512 tokens. A port whose
gate and up are swapped in every layer is judged against it, without a report and with one. The drawing is timed in
headless Chromium, which Playwright for Python drives; without both, it is left out.

    python scripts/bench_report.py --scratch /mnt/disk          takes 8 GB there
    python scripts/bench_report.py --layers 2                   tries it out
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cpu_golden import WIDE, write_model
from figures import Figure, benchmark_parser, print_figures
from peaks import Watched, watch_package
from port_runs import EXAMPLES

from reports.folder import PAGE_NAME

_TOKENS = "512"
_MODEL = replace(WIDE, num_attention_heads=8, num_key_value_heads=2)
_SWAPPED = f"{EXAMPLES / 'swapped_device_layer.py'}:SwappedDeviceLayer"
# Goals of the page.
LARGEST_MB, LONGEST_S = 6.0, 10.0


def main() -> int:
    """Measure and print; return 1 if a goal is missed, else 0."""
    parser = benchmark_parser(__doc__, scratch="room for the captures")
    parser.add_argument("--layers", type=int, default=62, help="number of layers (default: %(default)s)")
    parser.add_argument("--output-dir", type=Path, help="keep the report in this folder (default: removed)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mm2-report-", dir=arguments.scratch) as scratch:
        report = arguments.output_dir or Path(scratch, "report")
        plain, written = write_report(Path(scratch), report, num_layers=arguments.layers)
        page = report / PAGE_NAME
        if not page.exists():
            print("no page was written: the extra report is missing", file=sys.stderr)
            return 1
        figures = [
            Figure.plain("s to compare without a report", plain.wall_s),
            Figure.at_most("s to write all files", written.wall_s - plain.wall_s, LONGEST_S),
            Figure.at_most("MB of report.html", page.stat().st_size / 1e6, LARGEST_MB),
            *_drawing_figures(page.resolve()),
        ]
    return print_figures("report", figures, as_json=arguments.json)


def write_report(scratch: Path, report: Path, *, num_layers: int) -> tuple[Watched, Watched]:
    """Make model, golden and a wrong port's run; compare them without a report, and with one."""
    model, golden, run = (scratch / name for name in ("model", "golden", "run"))
    write_model(model, replace(_MODEL, num_hidden_layers=num_layers))
    sides = ("--golden", str(golden))
    for package, *words in (
        ("gpu_reference", "extract-all", "--seq-len", _TOKENS, "--output-dir", str(golden)),
        ("neuron", "sweep", *sides, "--backend", "cpu", "--target", _SWAPPED, "--output-dir", str(run)),
    ):
        watch_package(package, *words, "--model", str(model), "--quiet", expected=(0, 1))
    compare = ("compare", *sides, "--run", str(run), "--model", str(model), "--quiet")
    plain = watch_package(*compare, expected=(1,))
    return plain, watch_package(*compare, "--report-path", str(report), expected=(1,))


def _drawing_figures(page: Path) -> Iterator[Figure]:
    """Yield the time from opening the page to its last chart, and the lines on its console."""
    chromium = shutil.which("chromium")
    if chromium is None or importlib.util.find_spec("playwright") is None:
        print("no Chromium or no Playwright here: drawing is not timed", file=sys.stderr)
        return
    from playwright.sync_api import sync_playwright

    lines: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        opened = browser.new_page()
        opened.on("console", lambda message: lines.append(message.text))
        opened.on("pageerror", lambda error: lines.append(str(error)))
        began = time.monotonic()
        opened.goto(page.as_uri())
        shown_s = time.monotonic() - began
        opened.wait_for_selector("html[data-drawn=all]", timeout=120_000)
        drawn_s = time.monotonic() - began
        browser.close()
    yield Figure.plain("s until the page is loaded", shown_s)
    yield Figure.at_most("s until the last chart is drawn", drawn_s, LONGEST_S)
    yield Figure.exactly("lines on the console", len(lines), 0)


if __name__ == "__main__":
    sys.exit(main())
