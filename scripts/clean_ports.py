"""Ports that are right, run on synthetic and on trained models against goldens of several implementations.

What they differ by from the golden is noise: the limits of the verdict come from them (scripts/calibrate.py), and
are held against others of them (scripts/bench_clean_ports.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from cpu_golden import capture_cpu_golden
from text_rows import request_text_rows

from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.run import full_run, sweep_run
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.variants import DEFAULT_NUM_VARIANTS, variant_names
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.prompts import InputRequest
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
    # Half of MiniMax-M2's width and a quarter of its experts, heads as they are.
    "half": SyntheticModel(
        num_hidden_layers=2,
        hidden_size=1536,
        num_attention_heads=24,
        num_key_value_heads=4,
        num_local_experts=64,
        num_experts_per_tok=8,
        head_dim=128,
        rotary_dim=64,
        intermediate_size=768,
    ),
}
GOLDENS = (("sdpa", "grouped_mm"), ("eager", "eager"))
MODES = ("isolated", "chained")
_REPOSITORY = Path(__file__).parents[1]
EXAMPLES = Path(__file__).parent / "examples"
_TRANSFORMERS = (
    *("EagerAttention", "EagerExperts", "Eager", "BatchedExperts", "Same"),
    *("RoundedWeights", "LaterPositions", "Float32NormWeights"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One model and one golden of it.

    Args:
        shape: Of `SHAPES`, or the folder of a model that was trained.
        seed: Of a synthetic model's weights, and of the prompts.
        lengths: Of the prompts.
        attention, experts: The golden's implementations.
    """

    shape: str
    seed: int
    lengths: tuple[int, ...]
    attention: str
    experts: str

    def __str__(self) -> str:
        lengths = ",".join(map(str, self.lengths))
        return (
            f"{self.shape}, seed {self.seed}, rows of {lengths}, golden {self.attention} and {self.experts}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanPort:
    """A port that is right.

    Args:
        name: Of the implementation.
        target: As `--target` takes it.
        backend: Where it runs.
        tp_degree: Ranks that share a layer; 1 for a run in this process.
    """

    name: str
    target: str
    backend: str
    tp_degree: int = 1

    def __str__(self) -> str:
        ranks = f", {self.tp_degree} ranks" if self.tp_degree > 1 else ""
        return f"{self.name} on {self.backend}{ranks}"


def clean_ports(backends: Sequence[str], *, tp_degrees: Sequence[int] = ()) -> tuple[CleanPort, ...]:
    """mm2's two layers on every backend, transformers' implementations, and mm2's layer shared by ranks."""
    own = [
        CleanPort(name=name, target=name, backend=backend)
        for name in ("builtin", "reference")
        for backend in backends
    ]
    others = [
        CleanPort(
            name=f"transformers {name}", target=f"{EXAMPLES / 'transformers_port.py'}:{name}", backend="cpu"
        )
        for name in _TRANSFORMERS
        if "cpu" in backends
    ]
    shared = [
        CleanPort(name="builtin", target="builtin", backend=backend, tp_degree=degree)
        for degree in tp_degrees
        for backend in backends
    ]
    return (*own, *others, *shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A checkpoint and its golden, on disk."""

    folder: Path
    spec: ModelSpec
    golden: Capture

    @classmethod
    def build(cls, setting: Setting, scratch: Path) -> Bench:
        """Make below the folder `scratch` what is not there yet."""
        if setting.shape in SHAPES:
            folder = scratch / "model"
            synthesize(
                folder,
                model=SHAPES[setting.shape],
                dtype=torch.float8_e4m3fn,
                shard_size_bytes=None,
                seed=setting.seed,
            )
            rows = InputRequest(seq_lens=setting.lengths, seed=setting.seed)
        else:
            folder = Path(setting.shape)
            rows = request_text_rows(folder, setting.lengths, seed=setting.seed)
        golden = capture_cpu_golden(
            folder,
            scratch / "golden",
            rows=rows,
            sites_level="all",
            noise_floor="full",
            attention=setting.attention,
            experts=setting.experts,
            floor_variants=variant_names(DEFAULT_NUM_VARIANTS),
        )
        return cls(folder=folder, spec=ModelSpec.from_folder(folder), golden=golden)

    def run_ports(
        self, ports: Sequence[CleanPort], directory: Path, *, modes: Sequence[str] = MODES
    ) -> Iterator[tuple[CleanPort, str, Capture]]:
        """Every port in every mode, a backend at a time: its capture lies in `directory` until the next one."""
        for backend in dict.fromkeys(port.backend for port in ports):
            for port in ports:
                if port.backend == backend:
                    for mode in modes:
                        self._run(port, mode, directory)
                        yield port, mode, Capture.open(directory)

    def _run(self, port: CleanPort, mode: str, directory: Path) -> None:
        if port.tp_degree > 1:
            self._run_on_ranks(port, mode, directory)
            return
        with open_runtime(port.backend) as runtime, CheckpointReader(self.folder) as reader:
            DeviceRun(self._request(port, mode), runtime=runtime, reader=reader).capture(directory)

    def _request(self, port: CleanPort, mode: str) -> DeviceRequest:
        layers = self.spec.num_hidden_layers
        return DeviceRequest(
            folder=self.folder,
            spec=self.spec,
            model_source=str(self.folder),
            run=full_run(layers, sites_level="all")
            if mode == "chained"
            else sweep_run(Span(0, layers), sites_level="all"),
            inputs=self.golden.read_inputs(),
            dtype=torch.bfloat16,
            target=find_target(port.target),
            golden=self.golden,
        )

    def _run_on_ranks(self, port: CleanPort, mode: str, directory: Path) -> None:
        arguments = [
            *(sys.executable, "-m", "neuron", "full" if mode == "chained" else "sweep"),
            *("--model", self.folder, "--golden", self.golden.directory, "--output-dir", directory),
            *("--backend", port.backend, "--tp-degree", port.tp_degree, "--sites", "all", "--quiet"),
        ]
        environment = {**os.environ, "PYTHONPATH": str(_REPOSITORY), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [str(argument) for argument in arguments],
            cwd=_REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
        )
        # 1 is a verdict, and the capture is there.
        if done.returncode not in (0, 1):
            raise SystemExit(f"{port} could not run: {done.stderr[-2000:]}")
