"""Captures that no model made."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.capture.manifest import Description
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.writer import CaptureWriter, open_capture
from minimax_tools.model.inputs import pad_rows
from minimax_tools.model.run import multi_layer_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import Span
from minimax_tools.provenance import ModelFingerprint, Provenance

_OF_PROVENANCE = {field.name for field in fields(Provenance)}


class Recipe:
    """Writes captures of three chained layers, of a run on two rows."""

    def __init__(self) -> None:
        self.inputs = pad_rows(
            [[5, 6, 7], [8, 9]], padding_side="right", buckets=(), pad_token_id=0, source="a test"
        )
        self.written: list[int] = []  # layers that the last `write` wrote

    def describe(self, **changes: Any) -> Description:
        """Describe the run; changes are fields of the description or of its provenance."""
        plain = Description(
            side="neuron",
            run=multi_layer_run(Span(0, 3), sites_level="layer"),
            provenance=Provenance(
                model=ModelFingerprint(spec_digest="0" * 64, tensors_digest="1" * 64, layers={0: "2" * 64}),
                model_source="/models/MiniMax-M2",
                backend="cpu",
                device="cpu",
                dtypes={"weights": "bfloat16"},
                target="builtin",
                options={"attn_implementation": "sdpa", "proved": ["a", "b"]},
            ),
            inputs_digest=self.inputs.digest(),
            input_source=self.inputs.source,
        )
        of_provenance = {name: changes.pop(name) for name in _OF_PROVENANCE & changes.keys()}
        return replace(plain, provenance=replace(plain.provenance, **of_provenance), **changes)

    def layer(self, layer: int) -> dict[Site, torch.Tensor]:
        """Make the tensors of a layer, other numbers for each layer."""
        first = {Site.INPUT: torch.full((2, 3, 4), -1.0).bfloat16()} if layer == 0 else {}
        return {**first, Site.OUTPUT: torch.arange(24.0).reshape(2, 3, 4).bfloat16() + layer}

    def open(
        self, directory: Path, *, hidden_states: Any = None, **changes: Any
    ) -> AbstractContextManager[CaptureWriter]:
        return open_capture(
            directory, self.describe(**changes), inputs=self.inputs, hidden_states=hidden_states
        )

    def write(self, directory: Path, *, until: int = 3, hidden_states: Any = None, **changes: Any) -> Capture:
        """Write the layers that are not there; the capture is finished with the third."""
        self.written = []
        with self.open(directory, hidden_states=hidden_states, **changes) as writer:
            for layer in range(until):
                if layer not in writer.complete_layers:
                    writer.write(layer, self.layer(layer))
                    self.written.append(layer)
            if until == 3:
                writer.finish()
        return Capture.open(directory)

    def write_golden(self, directory: Path) -> Capture:
        """Write a golden of two layers, logits and generated tokens: 3 inputs, 4 values, 3 twins, 3 floors."""
        with self.open(directory, side="gpu_reference", noise_floor="full") as writer:
            for layer in (0, 1):
                tensors = self.layer(layer)
                twin = {Site.OUTPUT: tensors[Site.OUTPUT].float() + 0.5}
                writer.write(layer, tensors, twin=twin, floor={"output.error": torch.ones(2, 3)})
            logits = {ModelSite.LOGITS: torch.arange(30.0).reshape(2, 3, 5)}
            writer.write(None, logits, twin=logits, floor={"logits.error": torch.zeros(2, 3)})
            writer.write_json("generation.json", {"rows": [], "sampling": {}})
            writer.finish()
        return Capture.open(directory)


@pytest.fixture
def recipe() -> Recipe:
    return Recipe()
