"""A port, and what its runs need: `PortSetup` for layers, `ModelSetup` for a whole port; `RankExecutor` runs either."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.provenance import ModelFingerprint, Provenance, plain_values
from minimax_tools.stored_dtype import dtype_name
from neuron.devices.runtime import Runtime
from neuron.ports.target import ModelTarget, Port, Target

# A change of a layer's tensors, given the keys of config.json as attributes.
TensorEdit = Callable[[LayerTensors, Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A port on a model."""

    target: Port
    spec: ModelSpec
    model_source: str  # the model as the user named it
    dtype: torch.dtype
    budget: MemoryBudget = field(default_factory=MemoryBudget.unlimited)  # limit of anonymous memory

    def provenance(
        self, runtime: Runtime, *, model: ModelFingerprint, options: Mapping[str, Any]
    ) -> Provenance:
        """Describe what decides the numbers of a run: the port, the device, the layers of `model`, and `options`."""
        return Provenance(
            model=model,
            model_source=self.model_source,
            backend=str(runtime.backend),
            device=runtime.backend.description,
            dtypes={"weights": dtype_name(self.dtype)},
            target=self.target.name,
            target_digest=self.target.source_digest,
            model_config=plain_values(self.spec.raw),
            port_config=plain_values(self.target.port_config),
            options={**options, **self.target.sharing(runtime)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSetup(Setup):
    """A port's layers on a model."""

    target: Target
    inputs: Inputs  # the token rows; their size decides the memory that a layer takes
    prefetch: bool | None = None  # whether to read the next layer while one runs; None to decide by memory
    # Changes of every layer's tensors before the port converts them, each by the name of the mistake that it undoes.
    edits: Mapping[str, TensorEdit] = field(default_factory=dict)

    def provenance(
        self, runtime: Runtime, *, model: ModelFingerprint, options: Mapping[str, Any]
    ) -> Provenance:
        """Describe what decides the numbers of a run, the conversion and the compiler among it."""
        conversion = self.target.conversion
        further: dict[str, Any] = {} if conversion is None else conversion.as_options()
        if self.edits:
            further["undone"] = list(self.edits)
        if runtime.compiler is not None:
            further["compile"] = str(runtime.compiler)
        return Setup.provenance(self, runtime, model=model, options={**options, **further})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup(Setup):
    """A whole port on a model: all that its passes need to run."""

    target: ModelTarget
    folder: Path  # the checkpoint
    sites: tuple[Site, ...]  # sites of every layer to record


Executor = TypeVar("Executor", bound="RankExecutor")


class RankExecutor(ABC):
    """A runner of a port on all ranks. The lead's block orders the others to `follow`, then sends them what to do."""

    runtime: Runtime

    @abstractmethod
    def _order_to_follow(self) -> Callable[[Runtime], None]:
        """Return the function that another rank calls to make an executor of its own, and follow the lead's."""

    def _open(self) -> None:  # noqa: B027 - not all prepare something
        """Prepare what the lead will ask for, behind the order to follow."""

    @abstractmethod
    def _close(self) -> None:
        """Free the port, and end the threads."""

    def __enter__(self: Executor) -> Executor:
        self.send(self._order_to_follow())
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # After an error the others may be in the middle of an order, and receive nothing.
        if kind is None:
            self.send(None)
        self._close()

    def send(self, message: object) -> None:
        """Send the other ranks a message, if this rank is the lead."""
        if self.runtime.ranks.is_lead:
            self.runtime.messages.send(message)

    def follow(self) -> None:
        """Call what the lead sends, functions of an executor, until the lead's block ends; raise as they do."""
        while (order := self.runtime.messages.receive()) is not None:
            order(self)
