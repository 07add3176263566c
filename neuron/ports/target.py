"""The port under test, which --target names: `Target` is a decoder layer, `ModelTarget` a whole model.

Each kind of port is a subclass of one of them; `targets` lists the kinds. A port is built, then loaded with weights.
`port_errors` translates what its code raises.
"""

from __future__ import annotations

import copy
import inspect
import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from minimax_tools.checkpoint.filling import unchanged
from minimax_tools.checkpoint.layer_tensors import CheckpointTensors, LayerTensors, ModelTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import Mm2Error, TargetError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.spec import ModelSpec
from neuron.devices.backend import Backend
from neuron.devices.machine import LOWER, is_out_of_device_memory, shorten
from neuron.devices.ranks import Ranks
from neuron.devices.runtime import Runtime
from neuron.devices.weights import Weight, WeightLoader, reads_in_place
from neuron.ports.hub_names import hub_named, takes_own_names
from neuron.process.status import doing

if TYPE_CHECKING:
    from typing_extensions import Self

# Folders of libraries, of Python itself, and of mm2's packages: a port's own code lies in none of them.
_INSTALLED = {"site-packages", "dist-packages"}
_FOLDERS = (
    Path(os.__file__).parent,
    *(Path(__file__).parents[2] / name for name in ("neuron", "minimax_tools", "compare", "gpu_reference")),
)


class PortEndError(TargetError):
    """A port's attempt to exit, or its lack of memory. A caller that survives other errors of a port lets this pass."""


@contextmanager
def port_errors(failed: str, *, activity: str, next_step: str) -> Iterator[None]:
    """Turn any error of a port's code into a `TargetError`; errors of mm2 pass.

    `SystemExit` is caught too: a port's exit code must not be read as a verdict. If the port kills the process,
    the supervisor reads `activity`.

    Args:
        failed: Failure and location, such as "port port.py:Layer, layer 3 failed while it ran".
        activity: Work in progress, such as "running layer 3 of port port.py:Layer".
        next_step: The next step for the user.

    Raises:
        PortEndError: The code tried to exit, or ran out of memory.
    """
    try:
        with doing(activity):
            yield
    except (Mm2Error, KeyboardInterrupt):
        raise
    except BaseException as error:  # also SystemExit and classes that no handler knows
        if is_out_of_device_memory(error):
            raise PortEndError(
                f"{failed}: the device is out of memory", found=shorten(error), next_step=LOWER
            ) from error
        kind = PortEndError if isinstance(error, (SystemExit, MemoryError)) else TargetError
        found = f"{type(error).__name__}: {error}{_place(error)}"
        raise kind(failed, found=found, next_step=next_step) from error


def _place(error: BaseException) -> str:
    """Return the innermost line of the port's own code that an error passed, as `, at port.py:57`; empty if none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if (
            path.is_file()
            and not any(map(path.is_relative_to, _FOLDERS))
            and not _INSTALLED & set(path.parts)
        ):
            return f", at {path.name}:{frame.lineno}"
    return ""


_CONVERT_STEP = "It gets the hub's names; see --debug for the traceback."
_LOAD_STEP = "Its state_dict() is filled, then to(device) called; see --debug for the traceback."


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOrigin:
    """The owner of the conversion that gives a layer's weights the port's names and shapes."""

    words: str
    is_of_port: bool  # False if it is mm2's, which shows no mistake of the port's own

    def as_options(self) -> dict[str, str]:
        """Return it as options of a capture's provenance."""
        return {"conversion": self.words, "converted_by": "port" if self.is_of_port else "mm2"}


@dataclass(frozen=True, kw_only=True)
class Port(ABC):
    """An implementation of a decoder layer or of a whole model."""

    # Forms of a --target of this kind.
    forms: ClassVar[str]
    # Whether it takes rows that are padded on the right alone.
    pads_right: ClassVar[bool] = False

    name: str  # the value of --target
    source_digest: str  # sha256 of its source

    @classmethod
    @abstractmethod
    def find(cls, name: str) -> Self | None:
        """Find the port of a --target; None if it names another kind.

        Raises:
            UsageError: The name is malformed.
            TargetError: The file, the module or the name in it does not exist or cannot be imported.
        """

    @classmethod
    def find_again(cls, name: str) -> Self:
        """Find, on another rank, the port that the lead has found by this name; raise as `find` does."""
        found = cls.find(name)
        assert found is not None, "the lead has found it by this name"
        return found

    @property
    def build_dtype(self) -> torch.dtype | None:
        """Default dtype while the port is built; None for the run's dtype."""
        return None

    @property
    def port_config(self) -> Mapping[str, Any]:
        """The port's `mm2_neuron_config`; {} if it has none."""
        return {}

    @property
    def adds_over_ranks(self) -> bool:
        """True if the port adds up its ranks' partial sums in the run's `reduce_dtype`; most choose their own."""
        return False

    def sharing(self, runtime: Runtime) -> dict[str, int | str]:
        """Return the options by which ranks share the port, by name."""
        sharing = dict(runtime.sharing)
        if not self.adds_over_ranks:
            sharing.pop("reduce_dtype", None)
        return sharing

    def _conversion(self, module: nn.Module) -> Any:
        return getattr(module, "convert_state_dict", None)

    def _build(self, make: Callable[[], object], *, dtype: torch.dtype, part: str, call: str) -> nn.Module:
        """Build a module by `make`, under the port's default dtype; `part` and `call` name it in errors."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.build_dtype or dtype)
        step = f"It is called as {call}; see --debug for the traceback."
        failed, activity = f"port {self.name} cannot be built{part}", f"building port {self.name}{part}"
        try:
            with port_errors(failed, activity=activity, next_step=step):
                module = make()
                if isinstance(module, nn.Module):
                    module.eval()
        finally:
            torch.set_default_dtype(default)
        if not isinstance(module, nn.Module):
            raise TargetError(
                f"port {self.name} returned no module{part}",
                expected="torch.nn.Module",
                found=type(module).__name__,
                next_step=f"{call} must return it.",
            )
        return module

    def _convert(self, convert: Callable[[], object], *, part: str) -> dict[str, Weight]:
        """Return what the port's conversion makes of a part's tensors, in a dict that `WeightLoader.load` empties."""
        what = f"port {self.name}, {part}: convert_state_dict"
        activity = f"converting the weights of port {self.name}, {part}"
        # Tensors are read when the port asks for them: errors of the checkpoint pass as they are.
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
            # The port returned the tensors that it was given, perhaps some replaced: the others are read on loading.
            return {name: unchanged(converted, name) for name in converted}
        return dict(converted)


@dataclass(frozen=True, kw_only=True)
class Target(Port):
    """An implementation of a decoder layer."""

    # False if the weights come with the target instead of from the checkpoint.
    reads_weights: ClassVar[bool] = True
    # Whether each of several ranks is known to hold only its part of a layer.
    divides_weights: ClassVar[bool] = False

    @abstractmethod
    def make(self, config: Any, layer_idx: int) -> object:
        """Build a layer's module; `build` calls it under the build dtype."""

    @property
    def is_reused(self) -> bool:
        """True if one module serves all layers, its weights swapped."""
        return False

    @property
    def fills_storage(self) -> bool:
        """True if weights are known to be read straight into the module, with no second layer in memory."""
        return False

    @property
    def conversion(self) -> ConversionOrigin | None:
        """The origin of the conversion that fills the layer; None if the kind of target says it."""
        return None

    @property
    def may_convert(self) -> bool:
        """False if the port is known to have no convert_state_dict."""
        return True

    def num_experts_at_once(
        self, spec: ModelSpec, *, dtype: torch.dtype, is_lazy: bool, ranks: Ranks | None = None
    ) -> int | None:
        """Return the number of experts that run together, on a lazy device (XLA) in one graph; None if unknown."""
        return None

    def require_traceable(self, backend: Backend) -> None:
        """Check that a layer can be compiled into one file for a backend.

        Raises:
            UsageError: The target is compiled already.
            TargetError: The target is more than one program.
        """

    def converts(self, module: nn.Module) -> bool:
        """Decide whether the port converts tensors itself, with a second layer in memory."""
        convert = self._conversion(module)
        return convert is not None and not reads_in_place(convert)

    def build(
        self, spec: ModelSpec, layer: int, *, dtype: torch.dtype, ranks: Ranks | None = None
    ) -> nn.Module:
        """Build the module of a layer without loading weights; `ranks` share it, None stands for one rank alone.

        Raises:
            TargetError: The port raised, or returned no module.
        """
        return self._build(
            lambda: self.make(target_config(spec, ranks=ranks), layer),
            dtype=dtype,
            part=f" for layer {layer}",
            call="NAME(config, layer_idx)",
        )

    def load(
        self,
        module: nn.Module,
        tensors: LayerTensors,
        spec: ModelSpec,
        *,
        loader: WeightLoader,
        ranks: Ranks | None = None,
        prepared: dict[str, Weight] | None = None,
    ) -> None:
        """Load a layer's weights, on several ranks this rank's part, and move `module` to the loader's device.

        `prepared` is what `prepare` returned for this layer; None if it was not called.

        Raises:
            TargetError: The port's conversion raised, or its names or shapes do not fit.
        """
        weights = self._name_weights(module, tensors, spec, ranks) if prepared is None else prepared
        what = f"port {self.name}, layer {tensors.layer}"
        activity = f"loading layer {tensors.layer} of port {self.name}"
        with port_errors(f"{what} cannot be loaded", activity=activity, next_step=_LOAD_STEP):
            loader.load(module, weights, what=what)

    def prepare(
        self,
        module: nn.Module,
        tensors: LayerTensors,
        spec: ModelSpec,
        *,
        loader: WeightLoader,
        ranks: Ranks | None = None,
    ) -> dict[str, Weight]:
        """Return a layer's weights for `load`, and begin to read them while `module` computes with another's."""
        weights = self._name_weights(module, tensors, spec, ranks)
        loader.begin(module, weights)
        return weights

    def _name_weights(
        self, module: nn.Module, tensors: LayerTensors, spec: ModelSpec, ranks: Ranks | None
    ) -> dict[str, Weight]:
        convert = self._conversion(module)
        given = _named_for(module, convert, tensors, spec)
        if convert is None:
            return {name: unchanged(given, name) for name in given}
        return self._convert(
            lambda: convert(given, target_config(spec, ranks=ranks), tensors.layer),
            part=f"layer {tensors.layer}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBatch:
    """The sizes of a whole port's batch, known before it is built: caches and compiled graphs may have fixed sizes."""

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


@dataclass(frozen=True, kw_only=True)
class ModelTarget(Port):
    """An implementation of the whole model, from token ids to logits; the --target of `mm2-test model`."""

    @abstractmethod
    def make(self, config: Any) -> object:
        """Build the model's module; `build` calls it under the build dtype."""

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
        config = target_config(spec, ranks=ranks)
        config.batch = batch
        return self._build(lambda: self.make(config), dtype=dtype, part="", call="NAME(config)")

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
            TargetError: The port's conversion raised, or its names or shapes do not fit.
        """
        what, eager = f"port {self.name}", eager_module(module)
        parts = self._parts(eager, reader, spec, dtype=dtype, ranks=ranks)
        activity = f"loading port {self.name}"
        with port_errors(f"{what} cannot be loaded", activity=activity, next_step=_LOAD_STEP):
            loader.load_in_parts(eager, parts, what=what)

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
        convert, everything = self._conversion(module), "all weights"
        config = target_config(spec, ranks=ranks)
        # A conversion by layer takes `layer_idx` as its third argument.
        if convert is None or len(inspect.signature(convert).parameters) < 3:
            tensors = _named_for(module, convert, ModelTensors.open(reader, spec, dtype), spec)
            make = (lambda: tensors) if convert is None else (lambda: convert(tensors, config))
            yield everything, self._convert(make, part=everything)
            return
        opened: CheckpointTensors = ModelTensors.open(reader, spec, dtype, with_layers=False)
        outer, part = _named_for(module, convert, opened, spec), "weights outside the layers"
        yield part, self._convert(lambda: convert(outer, config, None), part=part)
        for layer in range(spec.num_hidden_layers):
            opened, part = LayerTensors.open(reader, spec, layer, dtype), f"layer {layer}"
            layer_tensors = _named_for(module, convert, opened, spec)
            # The lambda is called at once, within this turn of the loop.
            yield part, self._convert(lambda: convert(layer_tensors, config, layer), part=part)  # noqa: B023


def _named_for(
    module: nn.Module, convert: object, tensors: CheckpointTensors, spec: ModelSpec
) -> CheckpointTensors:
    """Return tensors by the names under which a port takes them: the hub's, unless it asks for mm2's."""
    return tensors if takes_own_names(module, convert) else hub_named(tensors, spec.family.stored_names)


def eager_module(module: nn.Module) -> nn.Module:
    """Return the module behind `torch.compile`; any other module as it is."""
    eager = getattr(module, "_orig_mod", module)
    return eager if isinstance(eager, nn.Module) else module


def target_config(spec: ModelSpec, *, ranks: Ranks | None = None) -> SimpleNamespace:
    """Return a new, writable copy of config.json as attributes, named as on the hub and as in transformers.

    `config.ranks` holds this rank and the number of ranks, `config.graph` the options of the model's graph.
    """
    family, keys = spec.family, spec.family.other_keys(spec.sizes())
    # Where a family's originals set these keys, a copy that transformers wrote may lack them.
    values = {
        **family.fixed_values,
        **{key: keys[key] for key in ("attn_type_list", "shared_intermediate_size") if key in keys},
        **copy.deepcopy(dict(spec.raw)),
        **{family.size_key(name): size for name, size in spec.sizes().items()},
    }
    config = SimpleNamespace(**values)
    config.graph = spec.graph
    config.ranks = ranks or Ranks()
    config.num_experts = config.num_local_experts = spec.num_local_experts
    config.moe_intermediate_size = spec.intermediate_size
    config.partial_rotary_factor = spec.rotary_dim / spec.head_dim
    config.rope_parameters = {
        "rope_type": "default",
        "rope_theta": spec.rope_theta,
        "partial_rotary_factor": config.partial_rotary_factor,
    }
    return config
