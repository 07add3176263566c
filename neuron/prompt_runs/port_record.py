"""PortRecord: a port's logits of the prompts of a list, kept in a folder while the list runs.

A killed run continues after its last whole batch. Another port, model, device, library, batch or golden begins anew.
t tokens, K candidates.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file

from compare.prompts.prompt_judge import PortLogits
from minimax_tools.errors import CaptureError
from minimax_tools.golden_logits.golden_logits import TokenLogits
from minimax_tools.json_codec import encode
from minimax_tools.machine.files import whole_capture_file
from minimax_tools.provenance import Provenance
from minimax_tools.text.answered_prompts import AnsweredPrompt

_FIELDS = ("candidates", "others", "following", "choices")


@dataclass(frozen=True, slots=True, kw_only=True)
class PortRecord:
    """The batches of one list that a port has run."""

    directory: Path
    run_digest: str  # sha256 of all that decides the port's numbers

    @classmethod
    def open(cls, directory: Path, provenance: Provenance) -> PortRecord:
        """Open the record of a run; `provenance` names port, model, device, libraries and options.

        Raises:
            CaptureError: The folder cannot be made.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CaptureError(
                f"{directory} cannot be made", found=str(error), next_step="Choose another --output-dir."
            ) from error
        text = json.dumps(encode(provenance), sort_keys=True)
        return cls(directory=directory, run_digest=hashlib.sha256(text.encode()).hexdigest())

    def read(self, batch: list[AnsweredPrompt]) -> list[PortLogits] | None:
        """Read the logits of a batch that ran before; None if it did not."""
        try:
            with safetensors.safe_open(self._path(batch), framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return [
                PortLogits(
                    tokens=tensors[f"{place}.tokens"],
                    logits=TokenLogits(**{name: tensors[f"{place}.{name}"] for name in _FIELDS}),
                )
                for place in range(len(batch))
            ]
        except (OSError, KeyError, safetensors.SafetensorError):
            # Not there, or not whole: the batch runs again.
            return None

    def write(self, batch: list[AnsweredPrompt], logits: list[PortLogits]) -> None:
        """Keep the logits of a batch.

        Raises:
            CaptureError: They cannot be written.
        """
        tensors: dict[str, torch.Tensor] = {}
        for place, port in enumerate(logits):
            tensors[f"{place}.tokens"] = port.tokens.contiguous()
            for name in _FIELDS:
                tensors[f"{place}.{name}"] = getattr(port.logits, name).contiguous()
        with whole_capture_file(self._path(batch)) as path:
            save_file(tensors, path)

    def _path(self, batch: list[AnsweredPrompt]) -> Path:
        rows: Any = [[prompt.prompt_ids, prompt.answer_ids] for prompt in batch]
        digest = hashlib.sha256(f"{self.run_digest} {json.dumps(rows)}".encode()).hexdigest()
        return self.directory / f"batch_{digest[:32]}.safetensors"
