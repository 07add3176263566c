"""Right ports, run on synthetic and on trained models against goldens of several implementations.

Their difference from the golden is noise. scripts/calibrate.py fits the limits of the verdict to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpu_golden import IMPLEMENTATIONS, capture_cpu_golden, request_text_rows, write_model
from port_runs import EXAMPLES, run_on_ranks, run_port

from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.run import full_run, sweep_run
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.variant_names import DEFAULT_NUM_VARIANTS, variant_names
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.input_request import InputRequest
from neuron.devices.runtime import open_runtime
from neuron.ports.targets import find_target

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
MODES = ("isolated", "chained")
# Classes of examples/transformers_port.py.
_TRANSFORMERS_PORTS = (
    "EagerAttention", "EagerExperts", "Eager", "BatchedExperts", "Same", "RoundedWeights", "LaterPositions",
    "Float32NormWeights",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model and a golden of it, before they are made."""

    shape: str  # name in `SHAPES`, or the folder of a trained model
    seed: int  # seed of a synthetic model's weights, and of the prompts
    lengths: tuple[int, ...]  # tokens of the prompts; () for mm2's default rows
    attention: str  # transformers' attention implementation of the golden
    experts: str  # transformers' experts implementation of the golden

    def __str__(self) -> str:
        rows = f"rows of {','.join(map(str, self.lengths))}" if self.lengths else "default rows"
        return f"{self.shape}, seed {self.seed}, {rows}, golden {self.attention} and {self.experts}"


def combine_settings(
    shapes: Sequence[str], seeds: Sequence[int], lengths: Sequence[tuple[int, ...]]
) -> list[Setting]:
    """List all combinations of shapes, seeds, lengths and the golden's implementations."""
    return [
        Setting(shape=shape, seed=seed, lengths=prompt_lengths, attention=attention, experts=experts)
        for shape in shapes
        for seed in seeds
        for prompt_lengths in lengths
        for attention, experts in IMPLEMENTATIONS
    ]


def parse_lengths(text: str) -> tuple[int, ...]:
    """Read the lengths of a batch's prompts, such as `96,61,7`; `default` stands for mm2's own rows, ()."""
    return () if text == "default" else tuple(int(length) for length in text.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanPort:
    """A right port."""

    name: str
    target: str
    backend: str
    tp_degree: int = 1  # number of ranks that share a layer; 1 runs in this process

    def __str__(self) -> str:
        ranks = f", {self.tp_degree} ranks" if self.tp_degree > 1 else ""
        return f"{self.name} on {self.backend}{ranks}"


def clean_ports(backends: Sequence[str], *, tp_degrees: Sequence[int] = ()) -> tuple[CleanPort, ...]:
    """List mm2's two layers on each backend, transformers' implementations, and mm2's layer shared by ranks."""
    of_mm2 = [
        CleanPort(name=name, target=name, backend=backend)
        for name in ("builtin", "reference")
        for backend in backends
    ]
    of_transformers = [
        CleanPort(
            name=f"transformers {name}", target=f"{EXAMPLES / 'transformers_port.py'}:{name}", backend="cpu"
        )
        for name in _TRANSFORMERS_PORTS
        if "cpu" in backends
    ]
    shared = [
        CleanPort(name="builtin", target="builtin", backend=backend, tp_degree=degree)
        for degree in tp_degrees
        for backend in backends
    ]
    return (*of_mm2, *of_transformers, *shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanModel:
    """The folder of a checkpoint, and its golden."""

    folder: Path
    golden: Capture

    @classmethod
    def build(cls, setting: Setting, scratch: Path) -> CleanModel:
        """Make checkpoint and golden in the folder `scratch`; a trained model stays in its own folder."""
        if setting.shape in SHAPES:
            folder = scratch / "model"
            write_model(folder, SHAPES[setting.shape], seed=setting.seed)
        else:
            folder = Path(setting.shape)
        if setting.lengths and setting.shape not in SHAPES:
            rows = request_text_rows(folder, setting.lengths, seed=setting.seed)
        else:
            rows = InputRequest(seq_lens=setting.lengths, seed=setting.seed)
        golden = capture_cpu_golden(
            folder,
            scratch / "golden",
            rows=rows,
            noise_floor="full",
            attention=setting.attention,
            experts=setting.experts,
            floor_variants=variant_names(DEFAULT_NUM_VARIANTS),
        )
        return cls(folder=folder, golden=golden)

    def run_ports(
        self, ports: Sequence[CleanPort], directory: Path
    ) -> Iterator[tuple[CleanPort, str, Capture]]:
        """Yield the capture of every port in every mode, backend by backend.

        Each capture lies in `directory` until the next one replaces it.
        """
        backends = list(dict.fromkeys(port.backend for port in ports))
        # A stable sort: the ports of a backend stay in their order.
        for port in sorted(ports, key=lambda port: backends.index(port.backend)):
            for mode in MODES:
                yield port, mode, self._run(port, mode, directory)

    def _run(self, port: CleanPort, mode: str, directory: Path) -> Capture:
        if port.tp_degree > 1:
            return run_on_ranks(
                "full" if mode == "chained" else "sweep",
                self.folder,
                self.golden,
                tp_degree=port.tp_degree,
                backend=port.backend,
                directory=directory,
            )
        spec = ModelSpec.from_folder(self.folder)
        num_layers = spec.num_hidden_layers
        run = (
            full_run(num_layers, sites_level="all", graph=spec.graph)
            if mode == "chained"
            else sweep_run(Span(0, num_layers), sites_level="all", graph=spec.graph)
        )
        with open_runtime(port.backend) as runtime, CheckpointReader(self.folder) as reader:
            target = find_target(port.target)
            return run_port(self.golden, target, run, reader=reader, runtime=runtime, directory=directory)
