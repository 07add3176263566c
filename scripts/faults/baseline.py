"""Baseline: a model, synthetic or trained, with prompts and the golden that ports are judged against."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from cpu_golden import IMPLEMENTATIONS, capture_cpu_golden, request_text_rows, write_model

from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import Q_PROJ, layer_prefix, scale_name
from minimax_tools.reference.variant_names import DEFAULT_NUM_VARIANTS, variant_names
from minimax_tools.synthetic.checkpoint import FP8
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.input_request import InputRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRequest:
    """A baseline before it is made."""

    name: str  # name in reports, and of the folder
    seed: int  # seed of a synthetic model's weights, and of the tokens
    lengths: tuple[int, ...]  # number of tokens of each prompt
    padding_side: str = "right"  # `left` or `right`
    start_positions: tuple[int, ...] = ()  # position of each prompt's first token; empty if all begin at 0
    num_layers: int = 4  # number of layers of the model
    intermediate_size: int = 256  # width of a synthetic model's experts
    shape: SyntheticModel | None = (
        None  # a synthetic model of another shape, whose layers then count; None for none
    )
    attention: str = "sdpa"  # transformers' attention implementation of the golden
    experts: str = "grouped_mm"  # transformers' experts implementation of the golden
    trained: TrainedModel | None = None  # the trained model; None for a synthetic one

    def on_implementation(self, number: int) -> BaselineRequest:
        """Return the same request with a golden by implementation `number` of `IMPLEMENTATIONS`."""
        attention, experts = IMPLEMENTATIONS[number]
        return replace(self, attention=attention, experts=experts)

    @property
    def is_fp8(self) -> bool:
        """True if the model's matrices are FP8 codes with scales; synthetic ones are stored as their originals."""
        if self.trained is not None:
            return self.trained.is_fp8
        return self.shape is None or self.shape.family.originals_are_fp8

    @property
    def has_far_positions(self) -> bool:
        """True if some prompt begins far from position 0."""
        return any(self.start_positions)

    @property
    def model_name(self) -> str:
        """Folder name of the trained model; empty for a synthetic one."""
        return self.trained.name if self.trained else ""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """An open checkpoint, and its golden of all sites with their float32 twins."""

    request: BaselineRequest  # description of the baseline
    folder: Path  # folder of the checkpoint
    golden: Capture  # capture of the golden
    reader: CheckpointReader  # reader of the checkpoint; open within `open_baseline`

    @cached_property
    def spec(self) -> ModelSpec:
        """Quantities of the model."""
        return ModelSpec.from_folder(self.folder)

    @cached_property
    def inputs(self) -> Inputs:
        """The prompts as ids, mask and positions."""
        return self.golden.read_inputs()

    def layers_with(self, sites: Iterable[Site]) -> tuple[int, ...]:
        """Return the layers that get a mistake at sites: the first that has them all, a middle one and the last."""
        wanted = set(sites)
        held = [n for n in range(self.request.num_layers) if wanted <= set(self.spec.graph.layer(n).sites)]
        return tuple(sorted({held[0], held[(len(held) - 1) // 2], held[-1]}))


@contextmanager
def open_baseline(request: BaselineRequest, scratch: Path) -> Iterator[Baseline]:
    """Make the model, unless it is there, and its golden in the folder `scratch`, and open both within the block."""
    folder = _prepare_model(request, scratch)
    golden = capture_cpu_golden(
        folder,
        scratch / request.name / "golden",
        rows=_request_prompts(request, folder),
        noise_floor="full",
        attention=request.attention,
        experts=request.experts,
        floor_variants=variant_names(DEFAULT_NUM_VARIANTS),
    )
    with CheckpointReader(folder) as reader:
        yield Baseline(request=request, folder=folder, golden=golden, reader=reader)


def _prepare_model(request: BaselineRequest, scratch: Path) -> Path:
    """Return the folder of the trained model, or of a synthetic one, which is written if it is missing."""
    if request.trained is not None:
        return Path(request.trained.folder)
    folder = scratch / request.name / "model"
    if not (folder / "config.json").is_file():
        # A small model with 32 experts, two kv heads and FP8 scales in grids.
        model = request.shape or SyntheticModel(
            num_hidden_layers=request.num_layers, intermediate_size=request.intermediate_size
        )
        write_model(folder, model, dtype=FP8 if request.is_fp8 else torch.bfloat16, seed=request.seed)
    return folder


def _request_prompts(request: BaselineRequest, folder: Path) -> InputRequest:
    """Request random tokens for a synthetic model, and held-out text for a trained one."""
    if request.trained is None:
        return InputRequest(
            seq_lens=request.lengths,
            padding_side=request.padding_side,
            start_positions=request.start_positions,
            seed=request.seed,
        )
    rows = request_text_rows(folder, request.lengths, seed=request.seed, padding_side=request.padding_side)
    return replace(rows, start_positions=request.start_positions)


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
