"""DeviceRequest: a device run before it starts. One that cannot be carried out is refused here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from compare.diagnosis.proof.undo import Undo
from minimax_tools.capture.digests import dtype_name
from minimax_tools.capture.further import FurtherPlace
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import UsageError
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import Mode, Run
from minimax_tools.model.spec import ModelSpec
from minimax_tools.provenance import ModelFingerprint, Provenance, plain_values
from neuron.devices.runtime import Runtime
from neuron.ports.target import Target
from neuron.runs.layer_run import StageFeeds

_GIVE_GOLDEN = "Give --golden DIR; mm2-gpu extract-all makes one."


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSetup:
    """A port on a model: all that its layers need to run."""

    target: Target
    spec: ModelSpec
    model_source: str  # the model as the user named it
    dtype: torch.dtype
    inputs: Inputs  # the token rows; their size decides the memory that a layer takes
    prefetch: bool | None = None  # whether to read the next layer while one runs; None to decide by memory
    budget: MemoryBudget = field(default_factory=MemoryBudget.unlimited)  # limit of anonymous memory
    undone: tuple[
        Undo, ...
    ] = ()  # mistakes to undo in the tensors of every layer, before the port converts them

    def provenance(
        self, runtime: Runtime, *, model: ModelFingerprint, options: Mapping[str, Any]
    ) -> Provenance:
        """Describe what decides the numbers of a run: the port, the device, the layers of `model`, and `options`."""
        conversion = self.target.conversion
        converted = {} if conversion is None else conversion.as_options()
        undone = {"undone": [str(undo) for undo in self.undone]} if self.undone else {}
        compiled = {} if runtime.compiler is None else {"compile": str(runtime.compiler)}
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
            options={**options, **self.target.sharing(runtime), **converted, **undone, **compiled},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequest(PortSetup):
    """A device run before it starts.

    Raises:
        UsageError: The options contradict each other, or the run needs a golden.
    """

    folder: Path  # the checkpoint
    run: Run  # the layers, the sites to record, and the way each layer gets its input
    golden: Capture | None = None  # source of the layers' inputs; None for tokens or random numbers
    random_input: bool = False  # whether the first layer's input is random
    seed: int = 0  # seed of the random input
    checks_capture: bool = False  # whether to run each layer again with nothing recorded, and compare
    profiles: bool = False  # whether to measure time and memory of every layer
    stage_feeds: StageFeeds | None = (
        None  # right values that replace the port's own at some sites; None for none
    )
    max_new_tokens: int = 0  # most tokens to generate after each row, in a run of the whole model; 0 for none
    further: tuple[FurtherPlace, ...] = ()  # further outputs of the port to store beside its sites

    def __post_init__(self) -> None:
        if self.further and self.run.num_decoded:
            raise UsageError(
                "--also and --decode were both given: --also works with one pass per layer, and --decode runs several",
                next_step="Leave one of them out.",
            )
        if self.run.num_decoded >= max(self.inputs.lengths):
            raise UsageError(
                f"of {max(self.inputs.lengths)} tokens {self.run.num_decoded} cannot be decoded",
                expected="at least one token before the first that is decoded",
                next_step="Give --decode fewer tokens.",
            )
        if self.random_input and self.golden is not None:
            raise UsageError(
                "--random-input and --golden were both given: a golden cannot judge a run on random numbers",
                next_step="Use one of them.",
            )
        if self.random_input and self.run.model_sites:
            raise UsageError(
                "--random-input leaves no embedding for a whole-model run to capture",
                next_step="Use --seq-len for random tokens, or mm2-test multi-layer --random-input.",
            )
        if self.golden is None and self.run.mode is Mode.ISOLATED and len(self.run.span) > 1:
            raise UsageError("a sweep gives every layer the golden's own input", next_step=_GIVE_GOLDEN)
        if self.golden is None and self.run.component is not None:
            raise UsageError("a component needs the golden's values at its border", next_step=_GIVE_GOLDEN)

    @property
    def lead_in(self) -> range:
        """The layers before the span, which compute its input from the tokens; empty if the input is given."""
        is_given = self.golden is not None or self.random_input
        return range(0 if is_given else self.run.span.start)

    @property
    def num_layers(self) -> int:
        """The number of layers to run, the lead-in included."""
        return len(self.lead_in) + len(self.run.span)
