"""ReplacedJudge: judges a port's logits in a run with a replaced stream.

Right models that round are computed from the golden's stream at the same point: so the layers before it add no noise.
The golden's own logits follow from its stream at every point.
t tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from compare.prompts.logits_verdict import judge_logits
from compare.prompts.prompt_judge import PortLogits
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import format_count
from minimax_tools.golden_logits.logits_store import LogitsStore
from minimax_tools.results.probes import Point, ReplacedRun
from minimax_tools.text.answered_prompts import split_rows
from neuron.prompt_runs.golden_rows import GoldenRows, captured_logits
from neuron.replacement.stream import GoldenStream

# Limit of a run, in units of the limits of one run alone: a search judges many. In 68 searches of right ports, of 542
# runs, one came to 1.003 of those, and the next to 0.92.
_LIMIT = 1.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLogits:
    """A port's next-token logits of some tokens of a row."""

    tokens: torch.Tensor  # indices in the row, int64 [t], ascending
    logits: torch.Tensor  # [t,V]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplacedJudge:
    """Judges the logits of all rows of the golden's batch."""

    stream: GoldenStream
    num_decoded: int  # tokens at the end of each row that were decoded
    reader: CheckpointReader
    folder: Path  # keeps golden logits from run to run

    def judge(self, point: Point, rows: Sequence[RowLogits]) -> ReplacedRun:
        """Judge a run with the stream replaced at a point.

        Raises:
            CheckpointError: A weight cannot be read.
            CaptureError: The golden cannot be read, or golden logits cannot be written.
        """
        prompts = split_rows(self.stream.inputs.real_rows(), num_decoded=self.num_decoded)
        start = None if point is None else self.stream.start(point)
        store = LogitsStore.open(self.folder, reader=self.reader, spec=self.stream.spec, start=start)
        source = GoldenRows(
            store=store,
            reader=self.reader,
            spec=self.stream.spec,
            captured=captured_logits(self.stream.golden),
        )
        source.make([prompt.row for prompt in prompts])
        ports = [
            PortLogits(tokens=row.tokens, logits=source.read(prompt.row).measure(row.logits, row.tokens))
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        num_layers = self.stream.spec.num_hidden_layers - (point or 0)
        through = f"{format_count(num_layers, 'layer')} and the head" if num_layers else "the head"
        verdict = judge_logits(prompts, ports, source, through=through)
        excess = verdict.excess / _LIMIT
        is_right = excess <= 1.0
        return ReplacedRun(
            point=point, is_right=is_right, excess=excess, reason="" if is_right else verdict.reason
        )
