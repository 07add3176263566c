"""LogitsStore: golden logits in a folder, kept from run to run, one file for each row of token ids.

    FOLDER/<digest of the model>/model.json             the model: fingerprint, and digest of its bytes
    FOLDER/<digest of the model>/<digest of the row>.safetensors
    FOLDER/<digest of the model>/<digest of the row>.alternatives_48.safetensors    where they were needed

Another model, and one whose weights changed, has another digest: its rows are computed anew.
C copies, T tokens of a row, K candidates.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file

from minimax_tools.checkpoint.fingerprint import digest_content, fingerprint_model
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CaptureError
from minimax_tools.golden_logits.golden_logits import (
    ALTERNATIVE_SHARES,
    KINDS,
    LOGITS_FIELDS,
    MOST_CANDIDATES,
    GoldenLogits,
    StreamStart,
    TokenLogits,
)
from minimax_tools.json_codec import encode
from minimax_tools.machine.files import whole_capture_file, whole_file
from minimax_tools.model.spec import ModelSpec
from minimax_tools.provenance import ModelFingerprint

logger = logging.getLogger(__name__)
# Another number for another computation of golden logits: those of earlier versions are computed anew.
_VERSION = 2
MODEL_FILE = "model.json"
# Usual name of the folder, beneath that of all captures.
LOGITS_FOLDER = "golden_logits"
_ALTERNATIVES = f".alternatives_{len(ALTERNATIVE_SHARES)}"
_DIGEST_KEY = "sha256"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsStore:
    """The golden logits of one model."""

    directory: Path  # the model's own folder
    model: ModelFingerprint
    start: StreamStart | None = None  # stream that the logits are computed from; None for the embedding

    @classmethod
    def open(
        cls, folder: Path, *, reader: CheckpointReader, spec: ModelSpec, start: StreamStart | None = None
    ) -> LogitsStore:
        """Open the store of a checkpoint beneath `folder`, and make it if it is missing.

        With `start`, the store holds the logits that follow from the golden's stream there.
        """
        fingerprint = fingerprint_model(reader, spec, range(spec.num_hidden_layers))
        record = {
            "version": _VERSION,
            "copies": [kind.name.lower() for kind in KINDS],
            "candidates": MOST_CANDIDATES,
            "fingerprint": encode(fingerprint),
            "content_digest": digest_content(reader.index),
            # Absent without one: the folders of whole models keep their names.
            **({} if start is None else {"stream": {"layer": start.layer, "sha256": start.digest()}}),
        }
        text = json.dumps(record, indent=2, sort_keys=True)
        directory = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not (directory / MODEL_FILE).is_file():
                with whole_file(directory / MODEL_FILE) as file:
                    file.write(text)
        except OSError as error:
            raise CaptureError(
                f"the golden logits' folder {directory} cannot be written",
                found=str(error),
                next_step="Choose another --golden-logits.",
            ) from error
        return cls(directory=directory, model=fingerprint, start=start)

    def has(self, row: Sequence[int]) -> bool:
        """Decide whether a row's golden logits are stored, whole and undamaged."""
        return self._read(row) is not None

    def read(self, row: Sequence[int]) -> GoldenLogits:
        """Read a row's golden logits."""
        found = self._read(row)
        if found is None:
            raise CaptureError(
                f"{self._path(row)} is missing or damaged", next_step="Run the same command again."
            )
        return found

    def read_alternatives(self, golden: GoldenLogits) -> tuple[TokenLogits, ...] | None:
        """Read the alternatives of a row; None if they are not stored, or damaged."""
        tensors = self._read_file(golden.row, _ALTERNATIVES)
        if tensors is None or not torch.equal(tensors["candidate_ids"], golden.candidates):
            return None
        return tuple(_copies(tensors))

    def write(self, golden: GoldenLogits) -> None:
        """Store the golden logits of a row."""
        self._write_file(golden, (golden.exact, *golden.variants))

    def write_alternatives(self, golden: GoldenLogits, alternatives: tuple[TokenLogits, ...]) -> None:
        """Store the alternatives of a row whose golden logits are known."""
        self._write_file(golden, alternatives, _ALTERNATIVES)

    def _path(self, row: Sequence[int], suffix: str = "") -> Path:
        digest = hashlib.sha256(",".join(map(str, row)).encode()).hexdigest()
        return self.directory / f"{digest[:32]}{suffix}.safetensors"

    def _write_file(self, golden: GoldenLogits, copies: tuple[TokenLogits, ...], suffix: str = "") -> None:
        tensors = {"input_ids": golden.input_ids, "candidate_ids": golden.candidates}
        for name in LOGITS_FIELDS:
            tensors[name] = torch.stack([getattr(copy, name) for copy in copies])  # [C,T,…]
        with whole_capture_file(self._path(golden.row, suffix)) as path:
            save_file(tensors, path, metadata={_DIGEST_KEY: _digest(tensors)})

    def _read(self, row: Sequence[int]) -> GoldenLogits | None:
        tensors = self._read_file(row)
        if tensors is None:
            return None
        exact, *variants = _copies(tensors)
        return GoldenLogits(
            input_ids=tensors["input_ids"],
            candidates=tensors["candidate_ids"],
            exact=exact,
            variants=tuple(variants),
        )

    def _read_file(self, row: Sequence[int], suffix: str = "") -> dict[str, torch.Tensor] | None:
        """Read the tensors of a row's file; None if it is missing or damaged."""
        path = self._path(row, suffix)
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                stored_digest = (file.metadata() or {}).get(_DIGEST_KEY)
        except FileNotFoundError:
            return None
        except (OSError, safetensors.SafetensorError) as error:
            logger.warning("%s is damaged (%s): it is computed anew.", path, error)
            return None
        if stored_digest != _digest(tensors) or tensors["input_ids"].tolist() != list(row):
            logger.warning("%s does not match its digest: it is computed anew.", path)
            return None
        return tensors


def _copies(tensors: dict[str, torch.Tensor]) -> list[TokenLogits]:
    """Return the logits of each copy that a row's file holds."""
    return [
        TokenLogits(**dict(zip(LOGITS_FIELDS, parts, strict=True)))
        for parts in zip(*(tensors[name] for name in LOGITS_FIELDS), strict=True)
    ]


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()
