"""Bisection of a whole port: its last wrong part, found by replacing its stream at one point in each run.

The port stays as it is compiled. Judged runs are kept in a journal, from which an interrupted bisection resumes.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path

from compare.chains.stream_search import search_stream
from minimax_tools.capture.address_records import address_of
from minimax_tools.capture.manifest import Description
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.checkpoint.fingerprint import ModelFingerprint
from minimax_tools.checkpoint.reader import CheckpointReader
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
from neuron.model_runs.model_executor import ModelExecutor
from neuron.model_runs.model_request import ModelRequest
from neuron.ports.model_batch import ModelBatch
from neuron.replacement.replaced_judge import ReplacedJudge
from neuron.replacement.replaced_port import ReplacedPort
from neuron.replacement.stream import GoldenStream
from neuron.runs.journal import Journal, open_journal

logger = logging.getLogger(__name__)


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

    Raises:
        UsageError: The run is not in BF16, or a prompt is too short to decode so many of its tokens.
        IncomparableError: The golden is of another model or dtype, or lacks the stream of a layer.
        TargetError: The port could not be built, loaded or run, or does not let its stream be replaced.
        CaptureError: The directory is in use or holds something else, or the golden cannot be read.
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
        probe = self.journal.find(parts)
        if probe is not None:
            logger.info("A run where %s: done before.", where)
            (chain,) = probe.chains
            return ReplacedRun(point=point, is_right=chain.is_right, excess=chain.excess, reason=chain.reason)
        logger.info("A run where %s.", where)
        run = self.judge.judge(point, self.port.run(point))
        chain = Chain(
            span=parts, is_right=run.is_right, excess=run.excess, visible=math.inf, reason=run.reason
        )
        self.journal.add(Probe(span=parts, chains=(chain,)))
        return run


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
            model=ModelFingerprint.of(reader, request.spec, span),
            options={"golden": stream.digest(header=golden.noise_floor)},
        ),
        inputs_digest=request.inputs.digest(),
        input_source=f"golden {golden.run.name}",
    )
