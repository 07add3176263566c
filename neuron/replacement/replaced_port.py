"""ReplacedPort: a whole port in memory, run with the golden's stream in place of its own at one point.

The passes are those of `mm2-test model`: a prefill, and steps that are fed the golden's own tokens.
B prompts, S columns of the golden's batch, s columns of a pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minimax_tools.command_line.progress import NoProgress, Progress
from minimax_tools.errors import TargetError
from minimax_tools.results.probes import Point
from neuron.model_runs.model_executor import ModelExecutor, PassRequest
from neuron.model_runs.pass_result import PassResult
from neuron.model_runs.passes import Pass
from neuron.ports.model_returned import REPLACE_STREAM
from neuron.replacement.replaced_judge import RowLogits
from neuron.replacement.stream import GoldenStream, ignores_stream


class ReplacedPort:
    """Runs of a port whose executor is open; `passes` are those of every run."""

    def __init__(
        self,
        executor: ModelExecutor,
        *,
        passes: Sequence[Pass],
        stream: GoldenStream,
        progress: Progress | None = None,
    ) -> None:
        self._executor = executor
        self._passes = passes
        self._stream = stream
        self._progress = progress or NoProgress()

    def run(self, point: Point) -> list[RowLogits]:
        """Run all passes with the stream replaced at a point, nowhere for None; return each row's logits.

        Raises:
            TargetError: The port could not be run, or does not let its stream be replaced.
            CaptureError: The golden cannot be read.
        """
        stream = None if point is None else self._stream.read(point)
        results = []
        for model_pass in self._passes:
            fed = None
            if point is not None and stream is not None:
                fed = (point, model_pass.cut(stream))
            request = PassRequest(
                model_pass=model_pass, is_first=model_pass.number == 0, records=False, fed=fed
            )
            results.append(self._executor.run(request))
            self._progress.advance(model_pass.number, num_bytes=0)
        if point is not None and stream is not None and self._executor.replaces_itself:
            self._require_taken(point, stream, results[0])
        return _gather(list(zip(self._passes, results, strict=True)), stream=self._stream)

    def _require_taken(self, point: int, stream: torch.Tensor, result: PassResult) -> None:
        """Refuse a port whose prefill gives the same logits for another stream, by one more prefill."""
        prefill = self._passes[0]
        fed = (point, -prefill.cut(stream))
        request = PassRequest(model_pass=prefill, is_first=True, records=False, fed=fed)
        if ignores_stream(result.logits, self._executor.run(request).logits):
            raise TargetError(
                f"port {self._executor.setup.target.name} did not take the stream that was to replace its own at "
                f"point {point}",
                expected="other logits for another stream",
                found="the same in every bit",
                next_step=f"Mend its {REPLACE_STREAM}(layer, states): see docs/whole-ports.md.",
            )


def _gather(ran: list[tuple[Pass, PassResult]], *, stream: GoldenStream) -> list[RowLogits]:
    """Gather each row's logits, and the tokens that they are of, from [B,s,·] or [B,1,·] of the passes."""
    vocab_size = stream.spec.vocab_size
    rows = []
    for row, mask in enumerate(stream.inputs.attention_mask):
        # Index in the row of the token in each column.
        indices = mask.cumsum(0) - 1
        tokens, logits = [], []
        for model_pass, result in ran:
            columns = model_pass.columns[row]
            if result.logits.shape[1] == len(columns):
                is_real = columns >= 0
                tokens.append(indices[columns[is_real]])
                logits.append(result.logits[row, is_real, :vocab_size])
            else:
                tokens.append(indices[columns[model_pass.last_columns[row]]][None])
                logits.append(result.logits[row, :1, :vocab_size])
        rows.append(RowLogits(tokens=torch.cat(tokens), logits=torch.cat(logits)))
    return rows
