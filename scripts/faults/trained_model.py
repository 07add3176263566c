"""TrainedModel: the identity of a folder of `train_models.py` in the plan and the journal of `bench_faults.py`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import Q_PROJ, layer_prefix, scale_name


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A folder that `train_models.py` wrote.

    Its `repr` is a part of a run's key in the journal: a model that was trained anew, or other text, is another key.
    """

    folder: str  # path
    digest: str  # first 16 digits of the sha256 over the files of the folder, the held-out text too
    num_layers: int  # layers of the model
    is_fp8: bool  # whether the matrices are stored as FP8 codes with scales

    @classmethod
    def open(cls, folder: Path) -> TrainedModel:
        """Describe the model in a folder.

        Raises:
            CheckpointError: The folder holds no checkpoint.
        """
        spec = ModelSpec.from_folder(folder)
        return cls(
            folder=str(folder),
            digest=_digest_folder(folder),
            num_layers=spec.num_hidden_layers,
            is_fp8=scale_name(layer_prefix(0) + Q_PROJ) in TensorIndex.from_folder(folder).entries,
        )

    @property
    def name(self) -> str:
        """Name of the folder."""
        return Path(self.folder).name


def _digest_folder(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
