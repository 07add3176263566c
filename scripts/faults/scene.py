"""Scene: a model, synthetic or trained, with the golden that ports are judged against."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cpu_golden import IMPLEMENTATIONS, capture_cpu_golden, request_text_rows, write_model

from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import Q_PROJ, layer_prefix, scale_name
from minimax_tools.reference.variants import DEFAULT_NUM_VARIANTS, variant_names
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.prompts import InputRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A folder that `mm2-split train` wrote.

    Args:
        folder: Path as text, so that a plan can be stored.
        digest: First digits of the sha256 over its files.
        num_layers: Layers of the model.
        is_fp8: Whether the matrices are stored as FP8 codes with scales.
    """

    folder: str
    digest: str
    num_layers: int
    is_fp8: bool

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneRequest:
    """A scene before it is made.

    Args:
        name: Name for people.
        seed: Seed of a synthetic model's weights, and of the tokens.
        lengths: Tokens of each prompt.
        padding_side: `left` or `right`.
        start_positions: Position of each prompt's first token; empty where all begin at 0.
        num_layers: Layers of the model.
        intermediate_size: Width of a synthetic model's experts.
        attention: transformers' attention implementation of the golden.
        experts: transformers' experts implementation of the golden.
        trained: The trained model; None for a synthetic one.
    """

    name: str
    seed: int
    lengths: tuple[int, ...]
    padding_side: str = "right"
    start_positions: tuple[int, ...] = ()
    num_layers: int = 4
    intermediate_size: int = 256
    attention: str = "sdpa"
    experts: str = "grouped_mm"
    trained: TrainedModel | None = None

    def changed(self, *, golden: int, **changes: Any) -> SceneRequest:
        """Return the same request with other values, and a golden of implementation number `golden`."""
        attention, experts = IMPLEMENTATIONS[golden]
        return replace(self, attention=attention, experts=experts, **changes)

    @property
    def is_fp8(self) -> bool:
        """True where the model's matrices are stored as FP8 codes with scales; those of synthetic models are."""
        return self.trained is None or self.trained.is_fp8

    @property
    def has_far_positions(self) -> bool:
        """True where some prompt begins far from position 0."""
        return any(self.start_positions)

    @property
    def model_name(self) -> str:
        """Folder name of the trained model; empty for a synthetic one."""
        return self.trained.name if self.trained else ""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A checkpoint, opened, and its golden of all sites with their float32 twins."""

    request: SceneRequest
    folder: Path
    golden: Capture
    reader: CheckpointReader

    @cached_property
    def spec(self) -> ModelSpec:
        """Quantities of the model."""
        return ModelSpec.from_folder(self.folder)

    @cached_property
    def inputs(self) -> Inputs:
        """The token rows."""
        return self.golden.read_inputs()

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that mistakes are planted in: early, middle and last."""
        last = self.request.num_layers - 1
        return tuple(sorted({0, last // 2, last}))


@contextmanager
def open_scene(request: SceneRequest, scratch: Path) -> Iterator[Scene]:
    """Make the model and its golden below `scratch`, where they are missing, and open them."""
    folder = _write_model(request, scratch)
    golden = capture_cpu_golden(
        folder,
        scratch / request.name / "golden",
        rows=_request_rows(request, folder),
        noise_floor="full",
        attention=request.attention,
        experts=request.experts,
        floor_variants=variant_names(DEFAULT_NUM_VARIANTS),
    )
    with CheckpointReader(folder) as reader:
        yield Scene(request=request, folder=folder, golden=golden, reader=reader)


def _write_model(request: SceneRequest, scratch: Path) -> Path:
    """Write a synthetic model, and return the model's folder."""
    if request.trained is not None:
        return Path(request.trained.folder)
    folder = scratch / request.name / "model"
    if not (folder / "config.json").is_file():
        # A small model with 32 experts, two kv heads and FP8 scales in grids.
        model = SyntheticModel(
            num_hidden_layers=request.num_layers, intermediate_size=request.intermediate_size
        )
        write_model(folder, model, seed=request.seed)
    return folder


def _request_rows(request: SceneRequest, folder: Path) -> InputRequest:
    """Request random tokens for a synthetic model, and held-out text for a trained one."""
    if request.trained is None:
        return InputRequest(
            seq_lens=request.lengths,
            padding_side=request.padding_side,
            start_positions=request.start_positions,
            seed=request.seed,
        )
    return request_text_rows(folder, request.lengths, seed=request.seed, padding_side=request.padding_side)
