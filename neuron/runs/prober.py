"""Prober: runs the probes of a search on a device, judges them, and notes them in a journal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from compare.chains.chain_judge import ChainJudge
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.progress import Progress
from minimax_tools.model.span import Span
from minimax_tools.results.probes import Chain, Probe
from neuron.devices.runtime import CompileCounts, Runtime
from neuron.runs.chain_runner import ChainRunner
from neuron.runs.journal import Journal
from neuron.runs.run_report import CompileReport

logger = logging.getLogger(__name__)

# Makes what is told of the layers of a probe.
Watch = Callable[[Span], AbstractContextManager[Progress]]


class Prober:
    """Runs probes, each once: what the journal holds is not run again.

    Args:
        runner: Runs chains.
        judge: Judges their ends.
        journal: Where probes are noted.
        chain_length: How many layers a chain has at most.
        runtime: The device, for its count of graphs.
        reader: The checkpoint, for its count of bytes.
        watch: Makes what is told of a probe's layers.
    """

    def __init__(
        self,
        *,
        runner: ChainRunner,
        judge: ChainJudge,
        journal: Journal,
        chain_length: int,
        runtime: Runtime,
        reader: CheckpointReader,
        watch: Watch,
    ) -> None:
        self._runner = runner
        self._judge = judge
        self._journal = journal
        self._chain_length = chain_length
        self._runtime = runtime
        self._reader = reader
        self._watch = watch
        self._asked: list[Probe] = []
        self._num_resumed = 0
        # Before the first layer that ran, and after each.
        self._counts: list[CompileCounts] = [runtime.count_compiles()]

    @property
    def probes(self) -> tuple[Probe, ...]:
        """What was asked for so far, in order."""
        return tuple(self._asked)

    @property
    def num_resumed(self) -> int:
        """How many of them were in the journal."""
        return self._num_resumed

    def run(self, span: Span) -> Probe:
        """The probe of `span`: its chains, up to the first that is wrong.

        Raises:
            IncomparableError: The golden holds NaN or Inf on a real row.
            CaptureError: The golden or the journal cannot be read or written.
            CheckpointError: A layer's tensors cannot be read.
            TargetError: The port could not be built, loaded or run.
        """
        probe = self._journal.find(span)
        if probe is not None:
            self._num_resumed += 1
            logger.info("Probe %d: %s: done before.", len(self._asked) + 1, span)
        else:
            logger.info("Probe %d: %s.", len(self._asked) + 1, span)
            probe = self._run(span)
            self._journal.add(probe)
        self._asked.append(probe)
        return probe

    def compile_report(self) -> CompileReport:
        """Graphs compiled for the first layer that ran and for all others, and what fell back to the CPU."""
        return CompileReport.of(self._counts)

    def _run(self, span: Span) -> Probe:
        chains: list[Chain] = []
        with self._watch(span) as progress:
            for part in _chains_of(span, self._chain_length):
                then = part.stop if part.stop < span.stop else None
                chains.append(self._run_chain(part, then=then, progress=progress))
                if not chains[-1].is_right:
                    break
        return Probe(span=span, chains=tuple(chains))

    def _run_chain(self, span: Span, *, then: int | None, progress: Progress) -> Chain:
        num_bytes = self._reader.num_bytes_read
        end: torch.Tensor | None = None
        for layer, output in self._runner.run_layers(span, then=then):
            end = output
            self._counts.append(self._runtime.count_compiles())
            progress.advance(layer, num_bytes=self._reader.num_bytes_read - num_bytes)
            num_bytes = self._reader.num_bytes_read
        assert end is not None, "a span is never empty"
        return self._judge.judge(span, end)


def _chains_of(span: Span, length: int) -> Iterator[Span]:
    for start in range(span.start, span.stop, length):
        yield Span(start, min(start + length, span.stop))
