"""How far ρ goes on ports that are right: what the limits in compare/criteria.py must leave room for.

mm2's device layer and reference layer, and transformers' own layer in each of its implementations, run
isolated and chained on synthetic models of several seeds and shapes, against goldens of two
implementations. Any verdict but `pass` is a false alarm, printed with its blame.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from cpu_golden import capture_cpu_golden
from figures import Figure, print_figures

from compare.comparer import compare_captures
from compare.criteria import DEFAULT_ATOL, DEFAULT_RTOL, NoiseLimits
from compare.judge import Criteria
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.checkpoint.synthetic import synthesize
from minimax_tools.checkpoint.synthetic_model import SyntheticModel
from minimax_tools.prompts import InputRequest
from minimax_tools.results import Comparison, NoiseRatio, RoutingResult, Verdict
from minimax_tools.run import full_run, sweep_run
from minimax_tools.span import Span
from minimax_tools.spec import ModelSpec
from neuron.devices.runtime import open_runtime
from neuron.ports.targets import find_target
from neuron.runs.device_request import DeviceRequest
from neuron.runs.runner import DeviceRun

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


class Tally:
    """What many comparisons of one kind of clean port came to."""

    def __init__(self) -> None:
        self._verdicts: list[Verdict] = []
        self._noise: list[NoiseRatio] = []
        self._routing: list[RoutingResult] = []

    def add(self, comparison: Comparison) -> None:
        """Count one more comparison."""
        self._verdicts.append(comparison.verdict)
        self._noise += [site.noise for site in comparison.sites if site.noise is not None]
        self._routing += [site.routing for site in comparison.sites if site.routing is not None]

    def figures(self, name: str) -> list[Figure]:
        """The largest figures, against the limits of the verdict."""
        limits = NoiseLimits()
        limit = limits.chained_fail if "chained" in name else limits.fail
        whole = max(max(noise.whole, noise.ordinary, noise.massive or 0.0) for noise in self._noise)
        token = max(noise.token_worst for noise in self._noise)
        alarms = sum(verdict is not Verdict.PASS for verdict in self._verdicts)
        unexplained = sum(routing.num_unexplained for routing in self._routing)
        flipped = sum(routing.num_flipped for routing in self._routing)
        tokens = sum(routing.num_tokens for routing in self._routing)
        return [
            Figure(figure=f"{name}: sites judged", value=len(self._noise)),
            Figure(figure=f"{name}: largest rho", value=whole, goal=f"<= {limit:g}", holds=whole <= limit),
            Figure(figure=f"{name}: largest rho of a token", value=token),
            Figure(figure=f"{name}: tokens with flipped experts, %", value=100 * flipped / tokens),
            Figure(
                figure=f"{name}: flips not explained", value=unexplained, goal="0", holds=unexplained == 0
            ),
            Figure(figure=f"{name}: false alarms", value=alarms, goal="0", holds=alarms == 0),
        ]


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
    tally: dict[str, Tally] = defaultdict(Tally)
    for shape in arguments.shapes:
        for seed in range(arguments.seeds):
            for attention, experts in (("sdpa", "grouped_mm"), ("eager", "eager")):
                setting = Setting(shape=shape, seed=seed, golden_attention=attention, golden_experts=experts)
                for name, comparison in compare_clean_ports(setting, arguments.backends):
                    tally[name].add(comparison)
                    print(f"{setting}: {name}: {comparison.verdict} {comparison.blame}", file=sys.stderr)
    figures = [figure for name in sorted(tally) for figure in tally[name].figures(name)]
    return print_figures("clean_ports", figures, as_json=arguments.json)


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
        golden = capture_cpu_golden(
            folder,
            Path(scratch) / "golden",
            rows=InputRequest(seq_lens=LENGTHS, seed=setting.seed),
            sites_level="all",
            noise_floor="full",
            attention=setting.golden_attention,
            experts=setting.golden_experts,
        )
        for kind, target, backend in clean_ports(backends):
            for mode in ("isolated", "chained"):
                directory = Path(scratch) / "run"
                run_port(folder, spec, golden, target=target, backend=backend, mode=mode, directory=directory)
                criteria = Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL)
                comparison = compare_captures(
                    golden, Capture.open(directory), criteria=criteria, layer_pattern="layer_*"
                )
                results.append((f"{kind}, {mode}", comparison))
    return results


def clean_ports(backends: list[str]) -> list[tuple[str, str, str]]:
    """Kind, target and backend of each clean port."""
    own = [
        (f"{target} on {backend}", target, backend)
        for target in ("builtin", "reference")
        for backend in backends
    ]
    others = [
        ("transformers, all implementations", f"{EXAMPLES / 'transformers_port.py'}:{name}", "cpu")
        for name in TRANSFORMERS
    ]
    return [*own, *others]


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


if __name__ == "__main__":
    sys.exit(main())
