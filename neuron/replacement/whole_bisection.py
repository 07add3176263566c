"""Bisection of a whole port: its last wrong part, found by replacing its stream at one point in each run.

The port stays as it is compiled. Judged runs are kept in a journal, from which an interrupted bisection resumes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compare.chains.stream_search import search_stream
from minimax_tools.capture.manifest import Description
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.checkpoint.fingerprint import ModelFingerprint
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import UsageError
from minimax_tools.model.run import sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.results.probes import Chain, Probe
from minimax_tools.results.replacements import Point, ReplacedRun, StreamSearch, name_point
from neuron.devices.runtime import Runtime
from neuron.model_runs.model_executor import ModelExecutor
from neuron.model_runs.model_request import ModelRequest
from neuron.model_runs.passes import plan_passes
from neuron.ports.model_batch import ModelBatch
from neuron.replacement.replaced_judge import ReplacedJudge
from neuron.replacement.replaced_port import ReplacedPort
from neuron.replacement.stream import GoldenStream
from neuron.runs.golden_inputs import GoldenInputs, digest_sites
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
    stream = open_stream(request.golden, request=request, reader=reader)
    passes = plan_passes(request.inputs, request.run.num_decoded)
    batch = ModelBatch.of(request.inputs, num_decoded=request.run.num_decoded, max_new_tokens=0)
    judge = ReplacedJudge(
        stream=stream, num_decoded=request.run.num_decoded, reader=reader, folder=logits_folder
    )
    description = _describe(request, runtime, reader=reader, golden=request.golden)
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
            reference=str(request.golden.directory),
            target=request.target.name,
            is_exhaustive=is_exhaustive,
        )


def open_stream(golden: Capture, *, request: ModelRequest, reader: CheckpointReader) -> GoldenStream:
    """Return the stream of a golden that fits the run.

    Raises:
        UsageError: The run is not in BF16.
        IncomparableError: The golden is of another model or dtype, or lacks the stream of a layer.
    """
    if request.dtype is not torch.bfloat16:
        raise UsageError(
            "logits are judged by the noise of BF16",
            expected="--dtype bfloat16",
            found=str(request.dtype).removeprefix("torch."),
            next_step="Leave out --dtype.",
        )
    spec = request.spec
    span = Span(0, spec.num_hidden_layers)
    sources = GoldenInputs(golden=golden, run=sweep_run(span, sites_level="layer"))
    sources.verify(model=ModelFingerprint.of(reader, spec, span), dtype=request.dtype)
    return GoldenStream(golden=golden, inputs=request.inputs, spec=spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class _JournalledRuns:
    """Runs of a port, each judged; one that the journal holds is not made again."""

    port: ReplacedPort
    judge: ReplacedJudge
    journal: Journal

    def judge_run(self, point: Point) -> ReplacedRun:
        num_layers = self.judge.stream.spec.num_hidden_layers
        where = f"the stream is replaced at the {name_point(point, num_layers=num_layers)}"
        parts = _parts_behind(point, num_layers=num_layers)
        probe = self.journal.find(parts)
        if probe is not None:
            logger.info("A run where %s: done before.", where)
            (chain,) = probe.chains
            return ReplacedRun(point=point, is_right=chain.is_right, excess=chain.excess, reason=chain.reason)
        logger.info("A run where %s.", where if point is not None else "nothing is replaced")
        run = self.judge.judge(point, self.port.run(point))
        chain = Chain(
            span=parts, is_right=run.is_right, excess=run.excess, visible=math.inf, reason=run.reason
        )
        self.journal.add(Probe(span=parts, chains=(chain,)))
        return run


def _parts_behind(point: Point, *, num_layers: int) -> Span:
    """Return the parts behind a point as a span, counted from the model's end: a run is stored under them."""
    return Span(0, num_layers + 2 if point is None else num_layers - point + 1)


def _describe(
    request: ModelRequest, runtime: Runtime, *, reader: CheckpointReader, golden: Capture
) -> Description:
    """Describe all that a run's result depends on. A bisection resumes only from a journal of this description."""
    span = Span(0, request.spec.num_hidden_layers)
    sites = [(layer, site) for layer in span for site in (Site.INPUT, Site.OUTPUT)]
    options: Mapping[str, object] = {
        "golden": digest_sites(golden, sites, header=golden.description.noise_floor)
    }
    return Description(
        side=DEVICE_SIDE,
        run=request.run,
        provenance=request.provenance(
            runtime, model=ModelFingerprint.of(reader, request.spec, span), options=options
        ),
        inputs_digest=request.inputs.digest(),
        input_source=f"golden {golden.description.run.name}",
    )
