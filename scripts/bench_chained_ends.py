"""The drift of right ports in chains of layers, for which compare/chains/chain_judge.py leaves room.

Right ports run on synthetic models of several seeds and shapes, in chains that begin at each layer with the golden's
input. For each length of a chain, the benchmark prints the largest of each part of the error, in the unit of
`compare.chains.chain_judge`, and the unit's share of the output. The limits, set by hand in chain_limits.py, are twice
the figures of the default settings.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from clean_ports import SHAPES as CLEAN_SHAPES
from cpu_golden import NARROW, capture_cpu_golden, write_model
from figures import Figure, benchmark_parser, print_figures
from port_runs import EXAMPLES

from compare.chains.chain_judge import (
    PARTS,
    ChainError,
    chain_limits,
    measure_error,
    measure_unit,
)
from compare.limits.tolerances import LONGEST_CHAIN
from compare.sides.sides import Batch
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.input_request import InputRequest
from neuron.devices.runtime import open_runtime
from neuron.ports.targets import find_target
from neuron.runs.bisection import run_chain
from neuron.runs.executor import LayerExecutor
from neuron.runs.port_setup import PortSetup

SHAPES = {
    "toy": SyntheticModel(num_hidden_layers=24),
    "narrow": NARROW,
    "wide": replace(CLEAN_SHAPES["wide"], num_hidden_layers=12),
}
PROMPT_LENGTHS = (96, 61, 7)
# Targets and their backends. The target `reference` is left out: on the CPU it equals `builtin` bit for bit.
PORTS = (
    ("builtin", "cpu"),
    *((f"{EXAMPLES / 'transformers_port.py'}:{name}", "cpu") for name in ("Eager", "EagerExperts")),
    ("builtin", "xla-cpu"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainEnd:
    """The end of one chain."""

    length: int
    error: ChainError  # error of the chain's last output, in the unit of `compare.chains.chain_judge`
    unit: float  # that unit, relative to the output


def main() -> int:
    """Measure and print; return 1 if a goal is missed, else 0."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: %(default)s)")
    parser.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="models (default: all)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="dtype of the runs (default: %(default)s)",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        help="begin a chain at each multiple of this layer (default: %(default)s)",
    )
    arguments = parser.parse_args()
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    ends: list[ChainEnd] = []
    for shape in arguments.shapes:
        for seed in range(arguments.seeds):
            of_model = list(measure(shape, seed=seed, dtype=dtype, every=arguments.every))
            ends += of_model
            worst = max(end.error.excess(chain_limits(end.length, dtype)) for end in of_model)
            print(
                f"{shape}, seed {seed}, {dtype}: {len(of_model)} ends, at most {worst:.2f} of their limits",
                file=sys.stderr,
            )
    return print_figures("chained_ends", list(figures(ends, dtype)), as_json=arguments.json)


def figures(ends: list[ChainEnd], dtype: torch.dtype) -> Iterator[Figure]:
    """Yield the largest errors by length, the unit, and the number of false alarms."""
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
    shape: str, *, seed: int, dtype: torch.dtype, every: int, ports: tuple[tuple[str, str], ...] = PORTS
) -> Iterator[ChainEnd]:
    """Yield the ends of chains of right ports on one model of `SHAPES`; each layer of a chain ends a shorter chain.

    A chain begins at each multiple of the layer number `every`.
    """
    with tempfile.TemporaryDirectory(prefix="mm2-chains-") as scratch:
        folder = Path(scratch) / "model"
        spec = write_model(folder, SHAPES[shape], seed=seed)
        golden = capture_cpu_golden(
            folder,
            Path(scratch) / "golden",
            rows=InputRequest(seq_lens=PROMPT_LENGTHS, seed=seed),
            sites_level="layer",
            noise_floor="stats" if dtype is torch.bfloat16 else "off",
            dtype=dtype,
        )
        for port, backend in ports:
            setup = PortSetup(
                spec=spec,
                model_source=str(folder),
                target=find_target(port),
                dtype=dtype,
                inputs=golden.read_inputs(),
            )
            with (
                open_runtime(backend) as runtime,
                CheckpointReader(folder) as reader,
                LayerExecutor(setup, runtime=runtime, reader=reader) as executor,
            ):
                for start in range(0, spec.num_hidden_layers, every):
                    yield from _measure_chain(golden, executor, start)


def _measure_chain(golden: Capture, executor: LayerExecutor, start: int) -> Iterator[ChainEnd]:
    batch = Batch.of(golden, golden)
    stop = min(start + LONGEST_CHAIN, len(golden.layers))
    for layer, output in run_chain(executor, golden, Span(start, stop)):
        # `layer_error` stands in for a floor, which goldens in float32 lack. The figure is chain_judge.py's.
        unit = measure_unit(golden, Span(start, layer + 1), batch=batch, layer_error=5e-6)
        reference = batch.rows(golden.read(layer, Site.OUTPUT), Site.OUTPUT)
        error = measure_error(reference, batch.rows(output, Site.OUTPUT), unit)
        yield ChainEnd(length=layer + 1 - start, error=error, unit=unit.relative)


if __name__ == "__main__":
    sys.exit(main())
