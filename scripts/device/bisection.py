"""Figures of bisection: the number of runs that find the wrong layers of 62.

The model is synthetic and narrow. The port is mm2's device layer. In the wrong layers its o_proj is zero, as if the
weight was never loaded. Runs are counted, not timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cpu_golden import NARROW, capture_cpu_golden, write_model
from figures import Figure

from compare.chains.chain_judge import default_chain_length
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.run import Extent
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.results.probes import Bisection
from minimax_tools.text.input_request import InputRequest
from neuron.builtin.layer import DeviceLayer
from neuron.devices.runtime import open_runtime
from neuron.devices.weights import Weight
from neuron.ports.targets import PortTarget
from neuron.runs.bisection import BisectRequest, bisect_layers

_LENGTHS = {"full": (96, 61), "toy": (24, 15)}  # tokens of each prompt
# Wrong layers that are searched for one at a time. The last layer takes the most runs; the others lie in either half of
# the model, and where one chain of a run ends and the next begins.
_SINGLE_CULPRITS = {"full": (0, 17, 31, 37, 60, 61), "toy": (37, 61)}
# Wrong layers that are searched for together.
_THREE_CULPRITS = (9, 37, 55)


def measure(scale: str) -> Iterator[Figure]:
    """Yield the figures of bisections of 62 layers with one culprit, with three, and with none."""
    with tempfile.TemporaryDirectory(prefix="mm2-bisection-") as scratch:
        bench = _Bench.make(Path(scratch), lengths=_LENGTHS[scale])
        singles = {layer: bench.bisect(frozenset({layer}), Extent.FIRST) for layer in _SINGLE_CULPRITS[scale]}
        num_runs = max(len(bisection.probes) for bisection in singles.values())
        yield Figure.at_most("bisect_runs_62", num_runs, 7)
        missed = sum(_culprits(bisection) != [layer] for layer, bisection in singles.items())
        yield Figure.exactly("bisect_single_culprits_missed", missed, 0)
        wanted = set(_THREE_CULPRITS)
        three = bench.bisect(frozenset(wanted), Extent.ALL)
        yield Figure.exactly("bisect_found_of_three", len({*_culprits(three)} & wanted), 3)
        yield Figure.exactly("bisect_found_beside_three", len({*_culprits(three)} - wanted), 0)
        yield Figure.plain("bisect_runs_62_of_three", len(three.probes))
        clean = bench.bisect(frozenset(), Extent.FIRST)
        yield Figure.exactly("bisect_false_alarms", len(clean.findings), 0)
        yield Figure.at_most("bisect_runs_62_clean", len(clean.probes), 7)
        yield Figure.plain("bisect_sees_in_chains_from_%", 100 * (clean.chained_visible or 0.0))
        yield Figure.plain("bisect_sees_alone_from_%", 100 * (clean.single_visible or 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """A checkpoint and its golden, on which ports are bisected."""

    folder: Path
    spec: ModelSpec
    golden: Capture

    @classmethod
    def make(cls, scratch: Path, *, lengths: tuple[int, ...]) -> _Bench:
        folder = scratch / "model"
        spec = write_model(folder, NARROW)
        golden = capture_cpu_golden(
            folder,
            scratch / "golden",
            rows=InputRequest(seq_lens=lengths),
            sites_level="layer",
            noise_floor="stats",
        )
        return cls(folder=folder, spec=spec, golden=golden)

    def bisect(self, layers: frozenset[int], extent: Extent) -> Bisection:
        """Bisect a port that is wrong in these layers: until the first is found, or all, as `extent` says."""
        request = BisectRequest(
            spec=self.spec,
            golden=self.golden,
            inputs=self.golden.read_inputs(),
            target=_port_without_o_proj(layers),
            dtype=torch.bfloat16,
            span=Span(0, self.spec.num_hidden_layers),
            extent=extent,
            chain_length=default_chain_length(torch.bfloat16),
            criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
            model_source=str(self.folder),
        )
        with (
            tempfile.TemporaryDirectory(prefix="mm2-journal-") as directory,
            open_runtime("cpu") as runtime,
            CheckpointReader(self.folder) as reader,
        ):
            bisection, _ = bisect_layers(request, runtime=runtime, reader=reader, directory=Path(directory))
            return bisection


def _port_without_o_proj(layers: frozenset[int]) -> PortTarget:
    """Build a target: the device layer, with an o_proj of zero in these layers."""

    class Port(DeviceLayer):
        def convert_state_dict(self, tensors: LayerTensors, config: Any, layer_idx: int) -> dict[str, Weight]:
            state: Mapping[str, Weight] = super().convert_state_dict(tensors, config, layer_idx)
            if layer_idx not in layers:
                return dict(state)
            name = "self_attn.o_proj.weight"
            return {**state, name: torch.zeros_like(tensors[name])}

    return PortTarget(name=f"o_proj unloaded in {sorted(layers)}", factory=Port, source_digest="")


def _culprits(bisection: Bisection) -> list[int]:
    return [finding.chain.span.start for finding in bisection.culprits]
