"""RunFolder: the folder of a search whose runs are made by hand, on the device of a port.

It holds what such a run needs, in the files of the tool that runs the port, and takes the logits of each run:

| file | holds |
|---|---|
| `replacement.json` | the golden, the model, and the sizes of the run |
| `inputs.safetensors` | token ids, mask and positions, int64 [B,S] |
| `logits/NAME.safetensors` or `.pt` | the port's logits [B,t,V] of each row's last t tokens; NAME is the point's |

NAME is `layer_3` for the input of layer 3, `final_norm`, or `unreplaced`. B prompts, S columns, V vocabulary.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from compare.prompts.logits_verdict import RowLogits
from minimax_tools.dumps.tensor_file import list_tensors, read_tensor
from minimax_tools.errors import CaptureError, TargetError, UsageError, shorten
from minimax_tools.json_codec import decode, encode
from minimax_tools.machine.files import new_folder, whole_capture_file
from minimax_tools.machine.json_file import read_own_json
from minimax_tools.model.inputs import Inputs
from minimax_tools.results.probes import Point, name_point
from neuron.model_runs.passes import Pass, plan_passes
from neuron.replacement.stream import ignores_stream

PLAN_NAME, INPUTS_NAME, LOGITS_NAME = "replacement.json", "inputs.safetensors", "logits"
_SUFFIXES = (".safetensors", ".pt")
_SCHEMA_VERSION = 2
# More than any model has of anything: a damaged file may give any number.
_MOST = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The golden, the model and the sizes of the runs of one folder."""

    tool: str  # tool that runs the port: `nxdi` or `vllm-neuron`
    golden_digest: str  # of the golden's stream at all points
    model_name: str  # the model as the user named it
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_decoded: int  # tokens at the end of each row that are decoded
    bucket: int  # columns of a prefill in the compiled graph; 0 if the graph has several
    schema_version: int = _SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.schema_version != _SCHEMA_VERSION:
            raise ValueError(f"version {shorten(str(self.schema_version))}, and not {_SCHEMA_VERSION}")
        least = {"num_layers": 1, "hidden_size": 1, "vocab_size": 1, "num_decoded": 0, "bucket": 0}
        for name, smallest in least.items():
            if not smallest <= getattr(self, name) <= _MOST:
                raise ValueError(f"{name} is {shorten(str(getattr(self, name)))}")

    @property
    def num_steps(self) -> int:
        """Number of passes: the prefill, and one for each decoded token."""
        return 1 + self.num_decoded


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """A folder of runs by hand."""

    directory: Path
    plan: RunPlan

    @classmethod
    def open(cls, directory: Path) -> RunFolder:
        """Open a folder that `make` wrote."""
        path = directory / PLAN_NAME
        try:
            plan = decode(RunPlan, read_own_json(path))
        except (OSError, ValueError) as error:
            raise CaptureError(
                f"{path} cannot be read",
                found=f"{type(error).__name__}: {error}",
                next_step="Write the folder with mm2-test replacement.",
            ) from error
        return cls(directory=directory, plan=plan)

    @classmethod
    def make(
        cls, directory: Path, plan: RunPlan, inputs: Inputs, *, write: Callable[[RunFolder], None]
    ) -> RunFolder:
        """Open the folder of a plan; if there is none, write it whole: the rows, the tool's files by `write`, the plan.

        Raises:
            UsageError: The folder holds another plan, or something else.
        """
        folder = cls(directory=directory, plan=plan)
        if (directory / PLAN_NAME).exists():
            folder._refuse_other(cls.open(directory).plan)
            return folder
        with new_folder(directory, size_bytes=0, remedy="Name another --output-dir.") as new:
            (new / LOGITS_NAME).mkdir()
            save_file(
                {name: tensor.contiguous() for name, tensor in inputs.tensors().items()}, new / INPUTS_NAME
            )
            write(cls(directory=new, plan=plan))
            text = json.dumps(encode(plan), indent=2) + "\n"
            (new / PLAN_NAME).write_text(text, encoding="utf-8")
        return folder

    def read_inputs(self) -> Inputs:
        """Read the rows of the runs."""
        path = self.directory / INPUTS_NAME
        return Inputs(
            input_ids=read_tensor(path, ("input_ids",)),
            attention_mask=read_tensor(path, ("attention_mask",)),
            position_ids=read_tensor(path, ("position_ids",)),
            source=str(self.directory),
        )

    def passes(self) -> list[Pass]:
        """Plan the passes of each run, padded on the right: NxDI and vLLM Neuron take no other prompts."""
        return plan_passes(self.read_inputs(), self.plan.num_decoded, pads_right=True)

    def logits_path(self, point: Point) -> Path:
        """Return the file that takes the logits of the run with the stream replaced at a point."""
        return self.directory / LOGITS_NAME / f"{self.name_run(point)}{_SUFFIXES[0]}"

    def name_run(self, point: Point) -> str:
        """Return the name of a run's files."""
        if point is None:
            return "unreplaced"
        return "final_norm" if point == self.plan.num_layers else f"layer_{point}"

    def write_logits(self, point: Point, logits: torch.Tensor) -> Path:
        """Write the logits [B,t,V] of a run."""
        path = self.logits_path(point)
        self._check_shape(path, tuple(logits.shape))
        with whole_capture_file(path) as temporary:
            save_file({LOGITS_NAME: logits.detach().to("cpu").contiguous()}, temporary)
        return path

    def read_logits(self, point: Point) -> list[RowLogits] | None:
        """Read the logits of a run, row by row; None if the run has not been made."""
        path = self.logits_path(point)
        path = next(
            (path.with_suffix(suffix) for suffix in _SUFFIXES if path.with_suffix(suffix).exists()), path
        )
        if not path.exists():
            return None
        held = list_tensors(path)
        if len(held) != 1:
            raise CaptureError(
                f"{path} holds {len(held)} tensors",
                expected="one, of logits [B,t,V]",
                next_step="Write the logits of each row's last t tokens, and nothing else.",
            )
        self._check_shape(path, held[0].shape)
        logits = read_tensor(path, held[0].keys)
        num_tokens = logits.shape[1]
        return [
            RowLogits(
                tokens=torch.arange(length - num_tokens, length),
                logits=row_logits[:, : self.plan.vocab_size],
            )
            for length, row_logits in zip(self.read_inputs().lengths, logits, strict=True)
        ]

    def drop_logits(self) -> None:
        """Remove the logits of all runs."""
        for path in (self.directory / LOGITS_NAME).iterdir():
            if path.suffix in _SUFFIXES:
                path.unlink()

    def refuse_unmoved(self, points: Sequence[Point]) -> None:
        """Refuse runs whose logits are the same at two points: the port did not replace its stream."""
        for one, other in itertools.combinations(points, 2):
            pair = [self.read_logits(point) for point in (one, other)]
            rows = [torch.cat([row.logits for row in run]) for run in pair if run is not None]
            if len(rows) == len(pair) and ignores_stream(*rows):
                raise TargetError(
                    f"the port's logits are the same in every bit, whether its stream was replaced at "
                    f"{name_point(one, num_layers=self.plan.num_layers)} or at "
                    f"{name_point(other, num_layers=self.plan.num_layers)}: it was not replaced",
                    next_step="Paste the lines for the model too, compile it again, and give --anew.",
                )

    def _check_shape(self, path: Path, shape: tuple[int, ...]) -> None:
        lengths = self.read_inputs().lengths
        least_vocabulary, most_tokens = self.plan.vocab_size, min(lengths)
        fits = (
            len(shape) == 3
            and shape[0] == len(lengths)
            and 1 <= shape[1] <= most_tokens
            and shape[2] >= least_vocabulary
        )
        if not fits:
            raise CaptureError(
                f"the logits for {path} have another shape",
                expected=f"[{len(lengths)},t,{least_vocabulary}] of each row's last t tokens, t at most {most_tokens}",
                found=str(list(shape)),
                next_step="Write those of all prompts in the golden's order, of the whole vocabulary.",
            )

    def _refuse_other(self, found: RunPlan) -> None:
        here, there = self._fields(self.plan), self._fields(found)
        differing = [name for name in here if here[name] != there.get(name)]
        if differing:
            raise UsageError(
                f"{self.directory} was written for another {', '.join(differing)}",
                expected="; ".join(f"{name} {here[name]}" for name in differing),
                found="; ".join(f"{name} {there.get(name)}" for name in differing),
                next_step="Name another --output-dir.",
            )

    @staticmethod
    def _fields(plan: RunPlan) -> Mapping[str, Any]:
        # The same model may be named in several ways: the golden's digest tells it.
        return {name: value for name, value in encode(plan).items() if name != "model_name"}
