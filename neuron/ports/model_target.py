"""ModelTarget: a whole port under test, from token ids to logits.

The value of `--target` of `mm2-test model` names it: `PATH.py:NAME` or `package.module:NAME`. NAME is called as
`NAME(config)`. `Target` is the same for a single decoder layer.

ModelBatch: the batch of a whole port's run, for ports whose caches and compiled graphs have fixed sizes.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from minimax_tools.checkpoint.filling import unchanged
from minimax_tools.checkpoint.layer_tensors import CheckpointTensors, LayerTensors, ModelTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import TargetError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.spec import ModelSpec
from neuron.devices.ranks import Ranks
from neuron.devices.runtime import Runtime
from neuron.devices.weights import Weight, WeightLoader
from neuron.ports.sources import import_callable
from neuron.ports.target import port_errors, target_config


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBatch:
    """The sizes of a run's batch, known before the port is built."""

    num_prompts: int
    num_tokens: int  # most columns of the port's cache, decoded and generated tokens included
    num_prefilled: int  # tokens of the shortest prompt in the prefill
    first_position: int  # smallest position of a real token
    replaces_stream: bool = False  # whether passes will replace the stream (see `REPLACE_STREAM`)

    @classmethod
    def of(cls, inputs: Inputs, *, num_decoded: int, max_new_tokens: int) -> ModelBatch:
        """Describe the batch of a run that decodes the last tokens of each prompt, and then generates."""
        # A repetition in another shape has a column more than there are passes.
        return cls(
            num_prompts=inputs.batch_size,
            num_tokens=inputs.sequence_length + max(max_new_tokens, 1 + num_decoded),
            num_prefilled=min(inputs.lengths) - num_decoded,
            first_position=int(inputs.position_ids[inputs.attention_mask.bool()].min()),
        )


_BUILD_STEP = "It is called as NAME(config); see --debug for the traceback."
_CONVERT_STEP = "It gets the hub's names; see --debug for the traceback."
_LOAD_STEP = "Its state_dict() is filled, then to(device) called; see --debug for the traceback."


@dataclass(frozen=True, kw_only=True)
class ModelTarget(ABC):
    """An implementation of the whole model."""

    # Forms of a --target of this kind.
    forms: ClassVar[str]
    # Whether it takes rows that are padded on the right alone.
    pads_right: ClassVar[bool] = False

    name: str  # the value of --target
    source_digest: str  # sha256 of its source

    @classmethod
    @abstractmethod
    def find(cls, name: str) -> ModelTarget | None:
        """Find the target of a name; None if it names another kind.

        Raises:
            TargetError: The file, the module or the name in it does not exist or cannot be imported.
        """

    @abstractmethod
    def make(self, config: Any) -> object:
        """Build the model's module; `build` calls it under the build dtype."""

    @property
    def build_dtype(self) -> torch.dtype | None:
        """Default dtype during `make`; None for the run's dtype."""
        return None

    @property
    def port_config(self) -> Mapping[str, Any]:
        """The port's `mm2_neuron_config`; {} if it has none."""
        return {}

    def sharing(self, runtime: Runtime) -> dict[str, int | str]:
        """Return the options by which ranks share the model, by name."""
        sharing = dict(runtime.sharing)
        # A port adds up its partial sums in a dtype of its own.
        sharing.pop("reduce_dtype", None)
        return sharing

    def build(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        batch: ModelBatch | None = None,
        ranks: Ranks | None = None,
    ) -> nn.Module:
        """Build the model without loading weights; `ranks` share it, None stands for one rank alone.

        The port finds `batch` in its config, as `config.batch`; None if batches of several sizes will come.

        Raises:
            TargetError: The port raised, or returned no module.
        """
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.build_dtype or dtype)
        try:
            failed = f"port {self.name} cannot be built"
            with port_errors(failed, activity=f"building port {self.name}", next_step=_BUILD_STEP):
                config = target_config(spec, ranks=ranks)
                config.batch = batch
                module = self.make(config)
                if isinstance(module, nn.Module):
                    module.eval()
        finally:
            torch.set_default_dtype(default)
        if not isinstance(module, nn.Module):
            raise TargetError(
                f"port {self.name} returned no module",
                expected="torch.nn.Module",
                found=type(module).__name__,
                next_step="NAME(config) must return the model.",
            )
        return module

    def load(
        self,
        module: nn.Module,
        reader: CheckpointReader,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        loader: WeightLoader,
        ranks: Ranks | None = None,
    ) -> None:
        """Load the weights, on several ranks this rank's part, and move `module` to the loader's device.

        Raises:
            CheckpointError: A tensor cannot be read.
            TargetError: The port's conversion raised, or its names or shapes do not fit.
        """
        what = f"port {self.name}"
        eager = eager_module(module)
        parts = self._parts(eager, reader, spec, dtype=dtype, ranks=ranks)
        with port_errors(
            f"{what} cannot be loaded", activity=f"loading port {self.name}", next_step=_LOAD_STEP
        ):
            loader.load_in_parts(eager, parts, what=what)

    def _conversion(self, module: nn.Module) -> Any:
        """Return the port's convert_state_dict; None if it has none."""
        return getattr(module, "convert_state_dict", None)

    def _parts(
        self,
        module: nn.Module,
        reader: CheckpointReader,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        ranks: Ranks | None,
    ) -> Iterator[tuple[str, dict[str, Weight]]]:
        """Yield the weights by the module's names: all at once, or layer by layer where the port converts so."""
        convert = self._conversion(module)
        if convert is None:
            tensors = ModelTensors.open(reader, spec, dtype)
            yield "all weights", {name: unchanged(tensors, name) for name in tensors}
            return
        config = target_config(spec, ranks=ranks)
        if not _converts_by_layer(convert):
            tensors = ModelTensors.open(reader, spec, dtype)
            yield "all weights", self._convert(lambda: convert(tensors, config), part="all weights")
            return
        outer = ModelTensors.open(reader, spec, dtype, with_layers=False)
        part = "weights outside the layers"
        yield part, self._convert(lambda: convert(outer, config, None), part=part)
        for layer in range(spec.num_hidden_layers):
            layer_tensors = LayerTensors.open(reader, spec, layer, dtype)
            # The lambda is called at once, within this turn of the loop.
            yield (
                f"layer {layer}",
                self._convert(
                    lambda: convert(layer_tensors, config, layer),  # noqa: B023
                    part=f"layer {layer}",
                ),
            )

    def _convert(self, convert: Callable[[], object], *, part: str) -> dict[str, Weight]:
        what = f"port {self.name}, {part}: convert_state_dict"
        activity = f"converting {part} of port {self.name}"
        with port_errors(f"{what} failed", activity=activity, next_step=_CONVERT_STEP):
            converted = convert()
        if not isinstance(converted, Mapping):
            raise TargetError(
                f"{what} returned no state dict",
                expected="a mapping of names to tensors",
                found=type(converted).__name__,
                next_step="Return what load_state_dict would take.",
            )
        if isinstance(converted, CheckpointTensors):
            # The port returned the tensors that it was given: those that it left alone are read on loading.
            return {name: unchanged(converted, name) for name in converted}
        return dict(converted)


@dataclass(frozen=True, kw_only=True)
class PortModelTarget(ModelTarget):
    """A class or function that is called as `factory(config)` and returns a module."""

    forms = "PATH.py:NAME or package.module:NAME"

    factory: Callable[[Any], object]

    @classmethod
    def find(cls, name: str) -> PortModelTarget | None:
        """Import the port's file or module; None if the name has another form."""
        found = import_callable(name)
        if found is None:
            return None
        source, factory = found
        return cls(name=name, factory=factory, source_digest=source.digest())

    def make(self, config: Any) -> object:
        """Call the port's factory."""
        return self.factory(config)

    @property
    def build_dtype(self) -> torch.dtype | None:
        """The default dtype under which the port wants its module built; None for the run's."""
        dtype: torch.dtype | None = getattr(self.factory, "build_dtype", None)
        return dtype

    def _conversion(self, module: nn.Module) -> Any:
        # A function may build a class that its author cannot change: then the function has the conversion.
        return super()._conversion(module) or getattr(self.factory, "convert_state_dict", None)


def eager_module(module: nn.Module) -> nn.Module:
    """Return the module behind `torch.compile`; any other module as it is."""
    eager = getattr(module, "_orig_mod", module)
    return eager if isinstance(eager, nn.Module) else module


def _converts_by_layer(convert: Callable[..., object]) -> bool:
    """Decide whether a convert_state_dict takes `layer_idx` as its third argument."""
    return len(inspect.signature(convert).parameters) >= 3
