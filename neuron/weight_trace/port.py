"""TracedPort: a port's layer on the CPU, loaded with what one likes: made tensors, or the checkpoint's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expected_layer_shapes
from neuron.devices.ranks import Ranks
from neuron.devices.weights import WeightLoader
from neuron.ports.port_errors import port_errors
from neuron.ports.returned import find_output
from neuron.ports.target import Target
from neuron.weight_trace.exchanges import Tensors
from neuron.weight_trace.made_tensors import MadeTensors, Make
from neuron.weight_trace.origin import Origin
from neuron.weight_trace.origin_reader import OriginReader
from neuron.weight_trace.places import find_places
from neuron.weight_trace.sample import Sample
from neuron.weight_trace.trial import TrialInput, TrialPort

# Of what a constructor left in a place more is not kept: it is compared with what loading left there.
_MOST_KEPT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedPort:
    """A port that holds the checkpoint's layer.

    Args:
        places: Every tensor that it holds.
        before: Small ones, as its constructor left them.
        tensors: The layer as it was given.
    """

    places: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor]
    tensors: LayerTensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedPort:
    """One rank's part of a port's layer.

    Args:
        target: The port.
        layer: The layer.
        dtype: The run's dtype.
        reader: The checkpoint.
        ranks: Those that share the layer.
        pool: The threads that read.
    """

    target: Target
    layer: int
    dtype: torch.dtype
    reader: CheckpointReader
    ranks: Ranks
    pool: ReadingPool

    def trace(self, spec: ModelSpec, sample: Sample) -> list[Origin]:
        """Where the elements of every place come from, in a model of `spec`.

        Args:
            spec: The model.
            sample: The experts that are followed.

        Raises:
            TargetError: The port cannot be built or loaded in such a model.
        """
        module = self._build(spec, self.dtype)

        def load(make: Make) -> dict[str, torch.Tensor]:
            self._load(module, self._made(spec, make, self.dtype), spec)
            return find_places(module)

        return OriginReader(sample.sources(spec), expected_layer_shapes(spec), load).read()

    def prepare_trial(self, spec: ModelSpec, dtype: torch.dtype) -> TrialPort:
        """The port built in that dtype, to be run on made weights.

        Raises:
            TargetError: It cannot be built.
        """
        module = self._build(spec, dtype)

        def run(tensors: Tensors, given: TrialInput) -> torch.Tensor:
            what = f"target {self.target.name}, layer {self.layer}"
            self._load(module, self._made(spec, tensors.__getitem__, dtype), spec)
            failed, step = f"{what} failed while it ran", "See --debug for the traceback."
            activity = f"running layer {self.layer} of target {self.target.name} on made weights"
            with torch.no_grad(), port_errors(failed, activity=activity, next_step=step):
                result = module(
                    given.hidden_states.to(dtype, copy=True),
                    given.attention_mask.clone(),
                    given.position_ids.clone(),
                )
            return find_output(result, tuple(given.hidden_states.shape), what=what)

        return TrialPort(
            run=run,
            computes_in_bf16=any(parameter.dtype.itemsize == 2 for parameter in module.parameters()),
        )

    def load(self, spec: ModelSpec) -> LoadedPort:
        """The port with the checkpoint's own layer in it.

        Raises:
            CheckpointError: The layer cannot be read.
            TargetError: The port cannot be built or loaded.
        """
        module = self._build(spec, self.dtype)
        before = {
            name: place.clone() for name, place in find_places(module).items() if place.numel() <= _MOST_KEPT
        }
        self._load(module, LayerTensors.open(self.reader, spec, self.layer, self.dtype), spec)
        return LoadedPort(
            places=find_places(module),
            before=before,
            tensors=LayerTensors.open(self.reader, spec, self.layer, self.dtype),
        )

    def _build(self, spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
        return self.target.build(spec, self.layer, dtype=dtype, ranks=self.ranks)

    def _made(self, spec: ModelSpec, make: Make, dtype: torch.dtype) -> MadeTensors:
        return MadeTensors(spec, layer=self.layer, dtype=dtype, make=make, reader=self.reader)

    def _load(self, module: nn.Module, tensors: LayerTensors, spec: ModelSpec) -> None:
        loader = WeightLoader(torch.device("cpu"), wait=lambda: None, pool=self.pool)
        self.target.load(module, tensors, spec, loader=loader, ranks=self.ranks)
