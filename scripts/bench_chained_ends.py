"""The drift of chains of layers in right ports, for which compare/chains/chain_limits.py leaves room.

Right ports run in chains from the golden's input at every layer, on synthetic models of several seeds and
shapes. For each length of a chain it prints the largest of each part of the error, in the unit of
`compare.chains.chain_noise`, and how much of the output that unit is; the limits are twice the figures that the default
settings gave. `--json` prints one object.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from clean_ports import EXAMPLES
from clean_ports import SHAPES as CLEAN_SHAPES
from cpu_golden import capture_cpu_golden
from figures import Figure, print_figures

from compare.chains.chain_limits import LONGEST_CHAIN, chain_limits
from compare.chains.chain_noise import PARTS, ChainError, measure_error, measure_unit
from compare.sides.batch import Batch
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.prompts import InputRequest
from neuron.devices.runtime import open_runtime
from neuron.ports.targets import find_target
from neuron.runs.bisection import run_chain
from neuron.runs.device_request import PortSetup
from neuron.runs.executor import LayerExecutor

SHAPES = {
    "toy": SyntheticModel(num_hidden_layers=24),
    "narrow": SyntheticModel(
        num_hidden_layers=62,
        hidden_size=128,
        num_attention_heads=4,
        head_dim=32,
        rotary_dim=16,
        num_local_experts=16,
        intermediate_size=64,
    ),
    "wide": replace(CLEAN_SHAPES["wide"], num_hidden_layers=12),
}
LENGTHS = (96, 61, 7)
# Targets and the backends they run on; the reference layer gives bit for bit what the device layer gives on the CPU.
PORTS = (
    ("builtin", "cpu"),
    *((f"{EXAMPLES / 'transformers_port.py'}:{name}", "cpu") for name in ("Eager", "EagerExperts")),
    ("builtin", "xla-cpu"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One synthetic model, run in one dtype."""

    shape: str
    seed: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The end of one chain.

    Args:
        length: Its number of layers.
        error: In the unit.
        unit: The unit, relative to the output.
    """

    length: int
    error: ChainError
    unit: float


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--every", type=int, default=1, help="begin a chain at every such layer")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    ends: list[Measured] = []
    for shape in arguments.shapes:
        for seed in range(arguments.seeds):
            setting = Setting(shape=shape, seed=seed, dtype=dtype)
            found = list(measure(setting, every=arguments.every))
            ends += found
            worst = max(end.error.excess(chain_limits(end.length, setting.dtype)) for end in found)
            print(f"{setting}: {len(found)} ends, at most {worst:.2f} of their limits", file=sys.stderr)
    return print_figures("chained_ends", list(figures(ends, dtype)), as_json=arguments.json)


def figures(ends: list[Measured], dtype: torch.dtype) -> Iterator[Figure]:
    """The largest errors by length, the unit, and how many ends would be false alarms."""
    for length in sorted({end.length for end in ends}):
        of_length = [end for end in ends if end.length == length]
        limits = chain_limits(length, dtype)
        name = f"{length} layer{'s' if length > 1 else ''}"
        for part in PARTS:
            largest = max(getattr(end.error, part) for end in of_length)
            yield Figure.at_most(f"{name}: largest {part}", largest, getattr(limits, part))
        yield Figure.plain(f"{name}: largest unit, %", 100 * max(end.unit for end in of_length))
        alarms = sum(end.error.excess(limits) > 1 for end in of_length)
        yield Figure.exactly(f"{name}: false alarms of {len(of_length)}", alarms, 0)


def measure(
    setting: Setting, *, every: int, ports: tuple[tuple[str, str], ...] = PORTS
) -> Iterator[Measured]:
    """The ends of chains of right ports on one model, after each of their layers.

    Args:
        setting: The model.
        every: A chain begins at every such layer.
        ports: Targets and their backends.
    """
    with tempfile.TemporaryDirectory(prefix="mm2-chains-") as scratch:
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
            sites_level="layer",
            noise_floor="stats" if setting.dtype is torch.bfloat16 else "off",
            dtype=setting.dtype,
        )
        for port, backend in ports:
            setup = PortSetup(
                spec=spec,
                model_source=str(folder),
                target=find_target(port),
                dtype=setting.dtype,
                inputs=golden.read_inputs(),
            )
            with (
                open_runtime(backend) as runtime,
                CheckpointReader(folder) as reader,
                LayerExecutor(setup, runtime=runtime, reader=reader) as executor,
            ):
                for start in range(0, spec.num_hidden_layers, every):
                    yield from _measure_chain(golden, executor, start)


def _measure_chain(golden: Capture, executor: LayerExecutor, start: int) -> Iterator[Measured]:
    batch = Batch.of(golden, golden)
    stop = min(start + LONGEST_CHAIN, len(golden.layers))
    for layer, output in run_chain(executor, golden, Span(start, stop)):
        unit = measure_unit(golden, Span(start, layer + 1), batch=batch, layer_error=5e-6)
        reference = batch.rows(golden.read(layer, Site.OUTPUT), Site.OUTPUT)
        error = measure_error(reference, batch.rows(output, Site.OUTPUT), unit)
        yield Measured(length=layer + 1 - start, error=error, unit=unit.relative)


if __name__ == "__main__":
    sys.exit(main())
