"""The golden's stream at a point of the model, and the judge of a port's logits in a run with that stream.

Right models that round are computed from the golden's stream at the same point: so the layers before it add no noise.
The golden's own logits follow from its stream at every point.
B prompts, S columns of the golden's batch, s columns of a pass, T tokens of a row, t of them, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from compare.prompts.logits_verdict import RowLogits, judge_rows
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.fingerprint import fingerprint_model
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import IncomparableError, UsageError, format_count
from minimax_tools.golden_logits.golden_logits import StreamStart
from minimax_tools.golden_logits.golden_rows import GoldenRows
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.results.probes import Point, ReplacedRun
from minimax_tools.stored_dtype import dtype_name
from neuron.runs.device_request import GoldenInputs, digest_sites


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenStream:
    """The stream of a golden of the whole model; a point is a layer's number, or the number of layers."""

    golden: Capture
    inputs: Inputs
    spec: ModelSpec

    def __post_init__(self) -> None:
        missing = [
            layer
            for layer in range(self.spec.num_hidden_layers)
            if self.golden.entry(layer, Site.OUTPUT) is None
        ]
        if self.golden.entry(0, Site.INPUT) is None or missing:
            what = f"the output of layer {missing[0]}" if missing else "the input of layer 0"
            raise IncomparableError(
                f"the golden {self.golden.directory} lacks {what}",
                expected="the input of layer 0, and the output of every layer",
                next_step="Capture it with mm2-gpu extract-all, or mm2-gpu full.",
            )

    @classmethod
    def open(
        cls, golden: Capture, *, reader: CheckpointReader, spec: ModelSpec, dtype: torch.dtype
    ) -> GoldenStream:
        """Return the stream of a golden that fits a run on the model that `reader` reads."""
        if dtype is not torch.bfloat16:
            raise UsageError(
                "logits are judged by the noise of BF16",
                expected="--dtype bfloat16",
                found=dtype_name(dtype),
                next_step="Leave out --dtype.",
            )
        span = Span(0, spec.num_hidden_layers)
        sources = GoldenInputs(golden=golden, run=sweep_run(span, sites_level="layer", graph=golden.graph))
        sources.verify(model=fingerprint_model(reader, spec, span), dtype=dtype)
        return cls(golden=golden, inputs=golden.read_inputs(), spec=spec)

    def digest(self, *, header: str = "") -> str:
        """Return the sha256 over the digests of the stream at all points, after `header`, a text to include."""
        layers = range(self.spec.num_hidden_layers)
        sites = [(layer, site) for layer in layers for site in (Site.INPUT, Site.OUTPUT)]
        return digest_sites(self.golden, sites, header=header)

    def read(self, point: int) -> torch.Tensor:
        """Read the stream at a point: [B,S,H] in the golden's dtype."""
        return self.golden.read(0, Site.INPUT) if point == 0 else self.golden.read(point - 1, Site.OUTPUT)

    def start(self, point: int) -> StreamStart:
        """Return the stream at a point as golden logits begin with it."""
        stream = self.read(point)
        rows = zip(self.inputs.real_rows(), stream, self.inputs.attention_mask, strict=True)
        return StreamStart(
            layer=point,
            states={tuple(row): states_sh[mask.bool()] for row, states_sh, mask in rows},
        )


def ignores_stream(logits: torch.Tensor, others: torch.Tensor) -> bool:
    """Decide whether the logits [...,V] of two runs, each with another stream, show that neither took its own.

    A head without weights ignores every stream: its logits are all one number, and prove nothing.
    """
    return torch.equal(logits, others) and bool((logits != logits[..., :1]).any())


# Limit of a run, in units of the limits of one run alone: a search judges many. In 68 searches of right ports, of 542
# runs, one came to 1.003 of those, and the next to 0.92.
_LIMIT = 1.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplacedJudge:
    """Judges the logits of all rows of the golden's batch."""

    stream: GoldenStream
    num_decoded: int  # tokens at the end of each row that were decoded
    reader: CheckpointReader
    folder: Path  # keeps golden logits from run to run

    def judge(self, point: Point, rows: Sequence[RowLogits]) -> ReplacedRun:
        """Judge a run with the stream replaced at a point."""
        source = GoldenRows.open(
            self.folder,
            reader=self.reader,
            spec=self.stream.spec,
            golden=self.stream.golden,
            start=None if point is None else self.stream.start(point),
        )
        num_layers = self.stream.spec.num_hidden_layers - (point or 0)
        through = f"{format_count(num_layers, 'layer')} and the head" if num_layers else "the head"
        verdict = judge_rows(
            self.stream.inputs.real_rows(), rows, source, num_decoded=self.num_decoded, through=through
        )
        excess = verdict.excess / _LIMIT
        is_right = excess <= 1.0
        return ReplacedRun(
            point=point, is_right=is_right, excess=excess, reason="" if is_right else verdict.reason
        )
