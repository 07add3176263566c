"""Size of the report page of a whole MiniMax-M2, and the time that it takes to write and to draw.

The values are random and of true size: 62 layers with all their sites, 256 experts, 8 sites of 512 tokens and 6144
channels shown element by element, and the logits of 2048 tokens. The drawing is timed in headless Chromium, which
Playwright for Python drives; without both, it is left out.

    python scripts/bench_report.py --json
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from figures import Figure, benchmark_parser, print_figures

from compare.evidence.collection import measure_site
from compare.noise.rows import Rows
from minimax_tools.metrics.noise_floor import massive_channels
from minimax_tools.metrics.pair_metrics import PairMetrics, compare_tensors
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import (
    Blame,
    BlameGroup,
    Comparison,
    Curve,
    CurvePoint,
    NoiseRatio,
    RoutingResult,
    SiteResult,
    SiteStatus,
    Verdict,
)
from reports.folder import PAGE_NAME, Report, write_report
from reports.page.evidence import (
    Evidence,
    FlipPoint,
    LayerRouting,
    LogitsEvidence,
    SiteErrors,
    TokenChance,
    TopTokens,
)
from reports.page.origins import OriginRow

NUM_LAYERS, NUM_EXPERTS, NUM_TOKENS, NUM_CHANNELS = 62, 256, 512, 6144
NUM_SHOWN_SITES, NUM_LOGITS, NUM_FLIPS = 8, 2048, 64
# Goals of the page.
LARGEST_MB, LONGEST_S = 6.0, 10.0
_MB = 1e6


def main() -> int:
    """Measure and print; return 1 if a goal is missed, else 0."""
    arguments = _parse_arguments()
    generator = torch.Generator().manual_seed(0)
    began = time.monotonic()
    evidence = Evidence(
        sites=tuple(_site_errors(generator)),
        routing=tuple(_routing(layer, generator) for layer in range(NUM_LAYERS)),
        logits=_logits(generator),
    )
    measured_s = time.monotonic() - began
    report = Report(
        comparison=_comparison(generator),
        next_commands=("mm2-diagnose --model DIR --golden GOLDEN --run RUN",),
        evidence=evidence,
        origins=tuple(OriginRow(name=f"value.{row}", golden="a" * 40, port="b" * 40) for row in range(60)),
    )
    with tempfile.TemporaryDirectory(prefix="mm2-report-") as scratch:
        folder = arguments.output_dir or Path(scratch)
        began = time.monotonic()
        written = write_report(report, folder)
        written_s = time.monotonic() - began
        page = folder / PAGE_NAME
        if page not in written.paths:
            print(written.missing, file=sys.stderr)
            return 1
        figures = [
            Figure.plain("s to measure the errors of 8 sites", measured_s),
            Figure.at_most("s to write all files", written_s, LONGEST_S),
            Figure.at_most("MB of report.html", page.stat().st_size / _MB, LARGEST_MB),
            *_drawing_figures(page.resolve()),
        ]
    return print_figures("report", figures, as_json=arguments.json)


def _parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--output-dir", type=Path, help="keep the report in this folder (default: removed)")
    return parser.parse_args()


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


def _comparison(generator: torch.Generator) -> Comparison:
    places: list[tuple[int | None, str]] = [
        (layer, str(site)) for layer in range(NUM_LAYERS) for site in Site
    ]
    places += [(None, str(site)) for site in ModelSite]
    blamed = (Blame(layer=5, sites=("moe_delta",), reason="error 91.6× the noise floor"),)
    return Comparison(
        reference="mm2-captures/gpu_reference/full_model",
        target="mm2-captures/neuron/full_model",
        criteria="noise",
        verdict=Verdict.FAIL,
        sites=tuple(_site_result(layer, site, generator) for layer, site in places),
        blame=blamed,
        blame_groups=(BlameGroup(layers=(5,), sites=("moe_delta",), worst_layer=5, reason=blamed[0].reason),),
        curve=Curve(
            points=tuple(
                CurvePoint(
                    layer=layer, error=0.01 * (layer + 1), handed_on=0.01 * layer, floor=0.01, ratio=1.2
                )
                for layer in range(NUM_LAYERS)
            ),
            onset=5,
            command="mm2-test single-layer --layer 5",
        ),
    )


def _site_result(layer: int | None, site: str, generator: torch.Generator) -> SiteResult:
    if site == Site.ROUTER_EXPERTS:
        routing = RoutingResult(
            num_tokens=NUM_TOKENS, num_flipped=NUM_FLIPS, num_explained=60, widest_unexplained_margin=0.01
        )
        return SiteResult(layer=layer, site=site, status=SiteStatus.PASS, routing=routing)
    rho = float(torch.rand((), generator=generator)) + 0.5
    return SiteResult(
        layer=layer,
        site=site,
        status=SiteStatus.FAIL,
        reason=f"error {rho:.3g}× the noise floor, limit 1.32, norm ×0.926",
        metrics=_pair_metrics(generator),
        noise=NoiseRatio(
            whole=rho,
            ordinary=rho,
            massive=rho,
            token_median=rho,
            token_p99=rho,
            token_worst=rho,
            worst_token=(0, 17),
            is_estimated=False,
            incoming=0.0,
            floor=0.004,
            interval=(0.9 * rho, 1.1 * rho),
            token_gain=rho,
            channel_gain=rho,
            channel_offset=rho,
            channel_worst=rho,
            worst_channel=239,
        ),
        num_judged=NUM_TOKENS,
        where=("half of the error lies in channels 128-255",),
    )


def _pair_metrics(generator: torch.Generator) -> PairMetrics:
    golden = torch.randn(4, 64, generator=generator)
    return compare_tensors(
        golden, golden + 1e-3 * torch.randn(4, 64, generator=generator), rtol=0.01, atol=0.001
    )


def _site_errors(generator: torch.Generator) -> Iterator[SiteErrors]:
    places = torch.stack((torch.zeros(NUM_TOKENS, dtype=torch.int64), torch.arange(NUM_TOKENS)), dim=1)
    for number in range(NUM_SHOWN_SITES):
        twin = torch.randn(NUM_TOKENS, NUM_CHANNELS, generator=generator)
        noise = torch.randn(NUM_TOKENS, NUM_CHANNELS, generator=generator)
        rows = Rows(
            reference=twin.bfloat16(),
            target=twin + 0.1 * noise,
            massive=massive_channels(twin),
            places=places,
            twin=twin,
        )
        yield measure_site(rows, layer=number, site="moe_delta", why="to blame")


def _routing(layer: int, generator: torch.Generator) -> LayerRouting:
    golden, port = (
        tuple(torch.randint(0, NUM_TOKENS, (NUM_EXPERTS,), generator=generator).tolist()) for _ in range(2)
    )
    margins = torch.rand(NUM_FLIPS, generator=generator).tolist()
    return LayerRouting(
        layer=layer,
        golden_load=golden,
        port_load=port,
        reach=0.5,
        flips=tuple(
            FlipPoint(row=0, position=position, margin=margin, is_explained=margin < 0.5)
            for position, margin in enumerate(margins)
        ),
    )


def _logits(generator: torch.Generator) -> LogitsEvidence:
    divergence = torch.rand(NUM_LOGITS, generator=generator).tolist()
    likeliest = tuple(TokenChance(token=token, text="a token", probability=0.1) for token in range(5))
    return LogitsEvidence(
        rows=tuple(number // NUM_TOKENS for number in range(NUM_LOGITS)),
        positions=tuple(number % NUM_TOKENS for number in range(NUM_LOGITS)),
        divergence=tuple(divergence),
        foreseen=tuple(divergence),
        top=tuple(
            TopTokens(row=0, position=position, divergence=1.0, golden=likeliest, port=likeliest)
            for position in range(6)
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
