"""Bisection of a whole port: its last wrong part, found by replacing its stream at one point in each run.

The port stays as it is compiled. The passes are those of `mm2-test model`: a prefill, and steps that are fed the
golden's own tokens. Judged runs are kept in a journal, from which an interrupted bisection resumes.
B prompts, S columns of the golden's batch, s columns of a pass, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compare.chains.stream_search import search_stream
from compare.prompts.logits_verdict import RowLogits
from minimax_tools.capture.manifest import Description
from minimax_tools.capture.mirror import address_of
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.checkpoint.fingerprint import fingerprint_model
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import TargetError
from minimax_tools.model.span import Span
from minimax_tools.results.probes import (
    Chain,
    Point,
    Probe,
    ReplacedRun,
    StreamSearch,
    count_parts_behind,
    name_point,
)
from neuron.devices.runtime import Runtime
from neuron.model_runs.assembly import PassResult
from neuron.model_runs.model_executor import ModelExecutor, PassRequest
from neuron.model_runs.model_request import ModelRequest
from neuron.model_runs.passes import Pass
from neuron.ports.returned import REPLACE_STREAM
from neuron.ports.target import ModelBatch
from neuron.replacement.stream import GoldenStream, ReplacedJudge, ignores_stream
from neuron.runs.bisection import Journal, open_journal


class ReplacedPort:
    """Runs of a port whose executor is open; `passes` are those of every run."""

    def __init__(self, executor: ModelExecutor, *, passes: Sequence[Pass], stream: GoldenStream) -> None:
        self._executor = executor
        self._passes = passes
        self._stream = stream

    def run(self, point: Point) -> list[RowLogits]:
        """Run all passes with the stream replaced at a point, nowhere for None; return each row's logits.

        Raises:
            TargetError: The port could not be run, or does not let its stream be replaced.
        """
        stream = None if point is None else self._stream.read(point)
        results = [self._run_pass(model_pass, point, stream) for model_pass in self._passes]
        if point is not None and stream is not None and self._executor.replaces_itself:
            self._require_taken(point, stream, results[0])
        return _gather(list(zip(self._passes, results, strict=True)), stream=self._stream)

    def _run_pass(self, model_pass: Pass, point: Point, stream: torch.Tensor | None) -> PassResult:
        fed = None if point is None or stream is None else (point, model_pass.cut(stream))
        is_first = model_pass.number == 0
        return self._executor.run(
            PassRequest(model_pass=model_pass, is_first=is_first, records=False, fed=fed)
        )

    def _require_taken(self, point: int, stream: torch.Tensor, result: PassResult) -> None:
        """Refuse a port whose prefill gives the same logits for another stream, by one more prefill."""
        if ignores_stream(result.logits, self._run_pass(self._passes[0], point, -stream).logits):
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


def bisect_whole(
    request: ModelRequest,
    *,
    runtime: Runtime,
    reader: CheckpointReader,
    directory: Path,
    logits_folder: Path,
    is_anew: bool = False,
    is_exhaustive: bool = False,
) -> StreamSearch:
    """Search a whole port for its last wrong part; every judged run is kept in a journal in `directory`.

    With `is_anew`, the runs that are recorded there are dropped; else they do not run again. With `is_exhaustive`, the
    stream is replaced at every point from the last on, up to the first that shows a mistake.
    """
    assert request.golden is not None, "the stream is a golden's"
    stream = GoldenStream.open(request.golden, reader=reader, spec=request.spec, dtype=request.dtype)
    passes = request.plan_passes(request.run.num_decoded)
    batch = ModelBatch.of(request.inputs, num_decoded=request.run.num_decoded, max_new_tokens=0)
    judge = ReplacedJudge(
        stream=stream, num_decoded=request.run.num_decoded, reader=reader, folder=logits_folder
    )
    description = _describe(request, runtime, reader=reader, stream=stream)
    with (
        open_journal(directory, description, is_anew=is_anew) as journal,
        ModelExecutor(
            request, batch=replace(batch, replaces_stream=True), runtime=runtime, reader=reader
        ) as executor,
    ):
        port = ReplacedPort(executor, passes=passes, stream=stream)
        runs = _JournalledRuns(port=port, judge=judge, journal=journal)
        return search_stream(
            request.spec.num_hidden_layers,
            runs.judge_run,
            reference=address_of(request.golden.directory),
            target=request.target.name,
            is_exhaustive=is_exhaustive,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _JournalledRuns:
    """Runs of a port, each judged; one that the journal holds is not made again."""

    port: ReplacedPort
    judge: ReplacedJudge
    journal: Journal

    def judge_run(self, point: Point) -> ReplacedRun:
        num_layers = self.judge.stream.spec.num_hidden_layers
        where = "nothing is replaced"
        if point is not None:
            where = f"the stream is replaced at {name_point(point, num_layers=num_layers)}"
        # A run is stored under the parts that it judges, counted from the model's end.
        parts = Span(0, count_parts_behind(point, num_layers=num_layers))

        def run() -> Probe:
            judged = self.judge.judge(point, self.port.run(point))
            chain = Chain(
                span=parts,
                is_right=judged.is_right,
                excess=judged.excess,
                visible=math.inf,
                reason=judged.reason,
            )
            return Probe(span=parts, chains=(chain,))

        (chain,) = self.journal.probe(parts, run, what=f"A run where {where}").chains
        return ReplacedRun(point=point, is_right=chain.is_right, excess=chain.excess, reason=chain.reason)


def _describe(
    request: ModelRequest, runtime: Runtime, *, reader: CheckpointReader, stream: GoldenStream
) -> Description:
    """Describe all that a run's result depends on. A bisection resumes only from a journal of this description."""
    span, golden = Span(0, request.spec.num_hidden_layers), stream.golden.description
    return Description(
        side=DEVICE_SIDE,
        run=request.run,
        provenance=request.provenance(
            runtime,
            model=fingerprint_model(reader, request.spec, span),
            options={"golden": stream.digest(header=golden.noise_floor)},
        ),
        inputs_digest=request.inputs.digest(),
        input_source=f"golden {golden.run.name}",
    )
