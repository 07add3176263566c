"""Measures how far ρ goes on clean ports: what the limits in compare/criteria.py must leave room for.

Ports that are right by construction (mm2's device layer and reference layer, transformers' own layer in each
of its implementations) run isolated and chained on synthetic models of several seeds and shapes. Prints the
largest figures per port, and with --json one object.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

from compare.comparer import compare_captures
from compare.criteria import DEFAULT_ATOL, DEFAULT_RTOL
from compare.judge import Criteria
from gpu_reference.golden import GoldenRequest, open_golden
from gpu_reference.model import GoldenModelRequest
from gpu_reference.placement import Placement
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.checkpoint.synthetic import synthesize
from minimax_tools.checkpoint.synthetic_model import SyntheticModel
from minimax_tools.prompts import InputRequest, build_inputs
from minimax_tools.results import Comparison, SiteResult
from minimax_tools.run import full_run, sweep_run
from minimax_tools.span import Span
from minimax_tools.spec import ModelSpec
from neuron.runner import DeviceRequest, DeviceRun
from neuron.runtime import open_runtime
from neuron.targets import find_target

SHAPES = {
    "toy": SyntheticModel(num_hidden_layers=6),
    "wide": SyntheticModel(
        num_hidden_layers=3,
        hidden_size=768,
        num_attention_heads=12,
        num_local_experts=64,
        num_experts_per_tok=8,
        head_dim=64,
        rotary_dim=32,
        intermediate_size=256,
    ),
    "deep": SyntheticModel(num_hidden_layers=16, hidden_size=256, num_experts_per_tok=8),
}
LENGTHS = (96, 61, 7)
EXAMPLES = Path(__file__).parent / "examples"
TRANSFORMERS = ("EagerAttention", "EagerExperts", "Eager", "BatchedExperts", "Same")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One synthetic model and one golden of it."""

    shape: str
    seed: int
    golden_attention: str
    golden_experts: str


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["toy", "wide"])
    parser.add_argument("--backends", nargs="+", default=["cpu", "xla-cpu"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures: dict[str, list[SiteResult]] = defaultdict(list)
    verdicts: dict[str, list[str]] = defaultdict(list)
    for shape in arguments.shapes:
        for seed in range(arguments.seeds):
            for attention, experts in (("sdpa", "grouped_mm"), ("eager", "eager")):
                setting = Setting(shape=shape, seed=seed, golden_attention=attention, golden_experts=experts)
                for name, comparison in compare_clean_ports(setting, arguments.backends):
                    figures[name].extend(comparison.sites)
                    verdicts[name].append(str(comparison.verdict))
                    print(f"{setting}: {name}: {comparison.verdict}", file=sys.stderr)
                    for blame in comparison.blame:
                        print(f"   {blame}", file=sys.stderr)
    rows = {
        name: summarise(sites) | {"verdicts": sorted(set(verdicts[name]))} for name, sites in figures.items()
    }
    if arguments.json:
        print(
            json.dumps(
                {"benchmark": "calibrate_limits", "machine": platform.platform(), "clean": rows}, indent=1
            )
        )
    else:
        for name, row in rows.items():
            print(name, row)
    return 0


def compare_clean_ports(setting: Setting, backends: list[str]) -> list[tuple[str, Comparison]]:
    """Every clean port against one golden, isolated and chained."""
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        synthesize(
            folder,
            model=SHAPES[setting.shape],
            dtype=torch.float8_e4m3fn,
            shard_size_bytes=None,
            seed=setting.seed,
        )
        spec = ModelSpec.from_folder(folder)
        golden = make_golden(folder, spec, setting, Path(scratch) / "golden")
        for name, target, backend in clean_ports(backends):
            for mode in ("isolated", "chained"):
                directory = Path(scratch) / f"{name}_{mode}"
                run_port(folder, spec, golden, target=target, backend=backend, mode=mode, directory=directory)
                criteria = Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL)
                comparison = compare_captures(
                    golden, Capture.open(directory), criteria=criteria, layer_pattern="layer_*"
                )
                results.append((f"{name} {mode} (golden {setting.golden_attention})", comparison))
    return results


def clean_ports(backends: list[str]) -> list[tuple[str, str, str]]:
    """Name, target and backend of each clean port."""
    ports = [
        (f"{target}/{backend}", target, backend)
        for target in ("builtin", "reference")
        for backend in backends
    ]
    alternatives = [(name, f"{EXAMPLES / 'transformers_port.py'}:{name}", "cpu") for name in TRANSFORMERS]
    return [*ports, *alternatives]


def make_golden(folder: Path, spec: ModelSpec, setting: Setting, directory: Path) -> Capture:
    """A golden of the whole model with its floor."""
    run = full_run(spec.num_hidden_layers, sites_level="all")
    request = GoldenRequest(
        model=GoldenModelRequest(
            folder=folder,
            spec=spec,
            num_hidden_layers=spec.num_hidden_layers,
            dtype=torch.bfloat16,
            placement=Placement(device_map={"": "cpu"}),
            attn_implementation=setting.golden_attention,
            experts_implementation=setting.golden_experts,
        ),
        model_source=str(folder),
        run=run,
        inputs=build_inputs(InputRequest(seq_lens=LENGTHS, seed=setting.seed), folder=folder, spec=spec),
        noise_floor="full",
    )
    with open_golden(request) as golden:
        golden.capture(directory, extra={})
    return Capture.open(directory)


def run_port(
    folder: Path, spec: ModelSpec, golden: Capture, *, target: str, backend: str, mode: str, directory: Path
) -> None:
    """One run of one port over all layers."""
    layers = spec.num_hidden_layers
    run = (
        full_run(layers, sites_level="all")
        if mode == "chained"
        else sweep_run(Span(0, layers), sites_level="all")
    )
    request = DeviceRequest(
        folder=folder,
        spec=spec,
        model_source=str(folder),
        run=run,
        inputs=golden.read_inputs(),
        dtype=torch.bfloat16,
        target=find_target(target),
        golden=golden,
    )
    with open_runtime(backend) as runtime, CheckpointReader(folder) as reader:
        DeviceRun(request, runtime=runtime, reader=reader).capture(directory)


def summarise(sites: list[SiteResult]) -> dict[str, object]:
    """The largest figures over many sites, and where each was found."""
    noisy = [site for site in sites if site.noise is not None]
    row: dict[str, object] = {"comparisons": len(sites)}
    for figure in ("whole", "ordinary", "massive", "token_median", "token_p99", "token_worst"):
        values = [
            (getattr(site.noise, figure) or 0.0, f"{site.site} of layer {site.layer}") for site in noisy
        ]
        largest, place = max(values, default=(0.0, "nowhere"))
        row[figure] = f"{largest:.2f} ({place})"
    flips = [site.routing for site in sites if site.routing is not None]
    row["flipped"] = sum(routing.num_flipped for routing in flips)
    row["unexplained"] = sum(routing.num_unexplained for routing in flips)
    row["tokens"] = sum(routing.num_tokens for routing in flips)
    row["failing"] = sorted({site.site for site in sites if str(site.status) == "fail"})
    return row


if __name__ == "__main__":
    sys.exit(main())
