"""Scene: a model, synthetic or learned, with its golden, which ports are judged against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from cpu_golden import capture_cpu_golden
from text_rows import request_text_rows

from faults.learned import LearnedModel
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.variants import DEFAULT_NUM_VARIANTS, variant_names
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.prompts import InputRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What a scene is made of.

    Args:
        name: For people.
        seed: Of a synthetic model's weights, and of the tokens.
        lengths: Of the prompts.
        padding_side: `left` or `right`.
        start_positions: Of the prompts' first tokens; empty where all begin at 0.
        num_layers: Of the model.
        intermediate_size: Of a synthetic model's experts.
        attention: transformers' attention that makes the golden.
        experts: Its experts.
        learned: The model that was trained; None for a synthetic one.
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
    learned: LearnedModel | None = None

    @property
    def is_fp8(self) -> bool:
        """Return whether the model's matrices are stored as FP8 codes with scales; those of synthetic ones are."""
        return self.learned is None or self.learned.is_fp8

    @property
    def has_far_positions(self) -> bool:
        """Return whether some prompt begins far from position 0."""
        return any(self.start_positions)

    def model(self) -> SyntheticModel:
        """Small, with 32 experts, two kv heads and FP8 scales in grids."""
        return SyntheticModel(num_hidden_layers=self.num_layers, intermediate_size=self.intermediate_size)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A checkpoint, opened, and its golden.

    Args:
        stage: What it was made of.
        folder: The checkpoint.
        golden: All sites, with their float32 twins.
        reader: The checkpoint's.
    """

    stage: Stage
    folder: Path
    golden: Capture
    reader: CheckpointReader

    @cached_property
    def spec(self) -> ModelSpec:
        """The model."""
        return ModelSpec.from_folder(self.folder)

    @cached_property
    def inputs(self) -> Inputs:
        """The token rows."""
        return self.golden.read_inputs()

    @property
    def layers(self) -> tuple[int, ...]:
        """Early, middle and last: where mistakes are planted. Those between stay right."""
        last = self.stage.num_layers - 1
        return tuple(sorted({0, last // 2, last}))


@contextmanager
def open_scene(stage: Stage, scratch: Path) -> Iterator[Scene]:
    """Make the model and its golden below `scratch`, where they do not lie there, and open them."""
    folder, golden = _write_model(stage, scratch), scratch / stage.name / "golden"
    capture = capture_cpu_golden(
        folder,
        golden,
        rows=_request_rows(stage, folder),
        sites_level="all",
        noise_floor="full",
        attention=stage.attention,
        experts=stage.experts,
        floor_variants=variant_names(DEFAULT_NUM_VARIANTS),
    )
    with CheckpointReader(folder) as reader:
        yield Scene(stage=stage, folder=folder, golden=capture, reader=reader)


def _write_model(stage: Stage, scratch: Path) -> Path:
    """The folder of the model; a learned one lies there already."""
    if stage.learned is not None:
        return Path(stage.learned.folder)
    folder = scratch / stage.name / "model"
    if not (folder / "config.json").is_file():
        synthesize(
            folder, model=stage.model(), dtype=torch.float8_e4m3fn, shard_size_bytes=None, seed=stage.seed
        )
    return folder


def _request_rows(stage: Stage, folder: Path) -> InputRequest:
    """Tokens drawn by chance for a synthetic model, and held-out text for a learned one."""
    if stage.learned is None:
        return InputRequest(
            seq_lens=stage.lengths,
            padding_side=stage.padding_side,
            start_positions=stage.start_positions,
            seed=stage.seed,
        )
    return request_text_rows(folder, stage.lengths, seed=stage.seed, padding_side=stage.padding_side)
