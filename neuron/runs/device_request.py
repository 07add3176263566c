"""DeviceRequest: a device run before it starts, refused where it cannot be carried out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.errors import UsageError
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import Mode, Run
from minimax_tools.model.spec import ModelSpec
from neuron.ports.target import Target

_GIVE_GOLDEN = "Give --golden DIR; mm2-gpu extract-all makes one."


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequest:
    """A device run before it starts.

    Args:
        folder: The checkpoint.
        spec: Its quantities.
        model_source: The model as the user named it.
        run: Layers, mode and sites.
        inputs: The token rows.
        dtype: Dtype of weights and activations.
        target: The implementation that runs.
        golden: Where the layers' inputs come from; None for tokens or random numbers.
        random_input: Whether the first layer is fed random numbers.
        seed: Their seed.
        prefetch: Whether the next layer is fetched from the disk while one runs; None for where memory holds it.
        budget: What anonymous memory may be taken.
        checks_capture: Whether every layer runs once more with nothing recorded, to see if recording changes it.
        profiles: Whether time and memory of every layer are kept.
        max_new_tokens: How many tokens are generated after each row, at most; of a run of the whole model.
    """

    folder: Path
    spec: ModelSpec
    model_source: str
    run: Run
    inputs: Inputs
    dtype: torch.dtype
    target: Target
    golden: Capture | None = None
    random_input: bool = False
    seed: int = 0
    prefetch: bool | None = None
    budget: MemoryBudget = field(default_factory=MemoryBudget.unlimited)
    checks_capture: bool = False
    profiles: bool = False
    max_new_tokens: int = 0

    def __post_init__(self) -> None:
        if self.run.decode_rows >= max(self.inputs.lengths):
            raise UsageError(
                f"of {max(self.inputs.lengths)} rows {self.run.decode_rows} cannot be decoded",
                expected="at least one row before the first that is decoded",
                next_step="Give --decode fewer rows.",
            )
        if self.random_input and self.golden is not None:
            raise UsageError(
                "--random-input and --golden were both given: no golden can judge what random numbers give",
                next_step="Use one of them.",
            )
        if self.random_input and self.run.model_sites:
            raise UsageError(
                "--random-input leaves no embedding for a whole-model run to capture",
                next_step="Use --seq-len for random tokens, or mm2-test multi-layer --random-input.",
            )
        if self.golden is None and self.run.mode is Mode.ISOLATED and len(self.run.span) > 1:
            raise UsageError("a sweep feeds every layer the golden's own input", next_step=_GIVE_GOLDEN)
        if self.golden is None and self.run.component is not None:
            raise UsageError("a component is fed the golden's values at its border", next_step=_GIVE_GOLDEN)

    @property
    def lead_in(self) -> range:
        """The layers before the span that make its input of the tokens, where nothing else gives it."""
        is_given = self.golden is not None or self.random_input
        return range(0 if is_given else self.run.span.start)

    @property
    def num_layers(self) -> int:
        """How many layers there are to run, the lead-in included."""
        return len(self.lead_in) + len(self.run.span)
