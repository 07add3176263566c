"""ModelRequest: a run of a whole port before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minimax_tools.capture.digests import dtype_name
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.fingerprint import ModelFingerprint
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import Run
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.provenance import Provenance, plain_values
from neuron.devices.runtime import Runtime
from neuron.model_runs.passes import Pass, plan_passes
from neuron.ports.model_target import ModelTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup:
    """A whole port on a model: all that its passes need to run."""

    target: ModelTarget
    spec: ModelSpec
    folder: Path  # the checkpoint
    dtype: torch.dtype
    sites: tuple[Site, ...]  # sites of every layer to record
    budget: MemoryBudget = field(default_factory=MemoryBudget.unlimited)  # limit of anonymous memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest(ModelSetup):
    """A run of a whole port before it starts."""

    run: Run
    model_source: str  # the model as the user named it
    inputs: Inputs  # the token rows: prompts and their continuation
    golden: Capture | None = None  # None for a run that is not judged
    max_new_tokens: int = 1  # most tokens to generate freely after each row
    runs_chunks: bool = True  # whether to run the rows in chunks too

    def plan_passes(self, num_decoded: int) -> list[Pass]:
        """Plan the prefill and `num_decoded` steps, each row padded as the port takes it (see `passes.plan_passes`)."""
        return plan_passes(self.inputs, num_decoded, pads_right=self.target.pads_right)

    def provenance(
        self, runtime: Runtime, *, model: ModelFingerprint, options: Mapping[str, Any]
    ) -> Provenance:
        """Describe what decides the numbers of the run: port, device, model and `options`."""
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
