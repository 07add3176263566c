"""Prober: runs the probes of a search on a device, judges them, and notes them in a journal.

A probe runs a span of layers in chains. A chain runs layers one after the other from the golden's input, and only its
last output is judged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from compare.chains.chain_judge import ChainJudge
from minimax_tools.capture.reader import Capture
from minimax_tools.command_line.progress import Progress
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.results.probes import Chain, Probe
from neuron.devices.runtime import CompileCounts
from neuron.runs.executor import LayerExecutor
from neuron.runs.journal import Journal
from neuron.runs.layer_run import LayerInput, LayerRequest
from neuron.runs.run_report import CompileReport

logger = logging.getLogger(__name__)

# Makes the progress of a probe's layers.
Watch = Callable[[Span], AbstractContextManager[Progress]]


def run_chain(
    executor: LayerExecutor, golden: Capture, span: Span, *, next_layer: int | None = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each layer of a chain with its output [B,S,H] on the CPU. The first layer gets the golden's input.

    Args:
        executor: Runs the layers.
        golden: The golden.
        span: The layers.
        next_layer: The layer that runs after them, to be read ahead.

    Raises:
        CaptureError: The golden's input cannot be read.
        CheckpointError: A layer's tensors cannot be read.
        TargetError: The port could not be built, loaded or run.
        MemoryBudgetError: A layer would exceed the budget.
    """
    states = golden.read(span.start, Site.INPUT)
    for layer in span:
        # No sites: the ports' own do not matter here, and all chains share their graphs.
        request = LayerRequest(
            layer=layer,
            layer_input=LayerInput.of(states, executor.setup.inputs),
            next_layer=layer + 1 if layer < span.last else next_layer,
        )
        states = executor.run(request).output
        yield layer, states


class Prober:
    """Runs probes, each once: a probe that the journal holds does not run again.

    Args:
        executor: Runs the layers.
        golden: The golden.
        judge: Judges the ends of chains.
        journal: The probes that have run.
        chain_length: Most layers in a chain.
        watch: Makes the progress of a probe's layers.
    """

    def __init__(
        self,
        executor: LayerExecutor,
        golden: Capture,
        *,
        judge: ChainJudge,
        journal: Journal,
        chain_length: int,
        watch: Watch,
    ) -> None:
        self._executor = executor
        self._golden = golden
        self._judge = judge
        self._journal = journal
        self._chain_length = chain_length
        self._watch = watch
        self._probes: list[Probe] = []
        self.num_resumed = 0
        # Before the first layer that ran, and after each.
        self._counts: list[CompileCounts] = [executor.runtime.count_compiles()]

    @property
    def probes(self) -> tuple[Probe, ...]:
        """The probes so far, in order; `num_resumed` of them were in the journal."""
        return tuple(self._probes)

    def run(self, span: Span) -> Probe:
        """Return the probe of `span`: its chains, up to the first that is wrong.

        Raises:
            IncomparableError: The golden holds NaN or Inf on a real row.
            CaptureError: The golden or the journal cannot be read or written.
            CheckpointError: A layer's tensors cannot be read.
            TargetError: The port could not be built, loaded or run.
        """
        probe = self._journal.find(span)
        if probe is not None:
            self.num_resumed += 1
            logger.info("Probe %d: %s: done before.", len(self._probes) + 1, span)
        else:
            logger.info("Probe %d: %s.", len(self._probes) + 1, span)
            probe = self._run(span)
            self._journal.add(probe)
        self._probes.append(probe)
        return probe

    def compile_report(self) -> CompileReport:
        """Count the graphs of the first layer that ran and of all others, and the fallbacks to the CPU."""
        return CompileReport.of(self._counts)

    def _run(self, span: Span) -> Probe:
        chains: list[Chain] = []
        with self._watch(span) as progress:
            for start in range(span.start, span.stop, self._chain_length):
                part = Span(start, min(start + self._chain_length, span.stop))
                chains.append(self._run_chain(part, whole=span, progress=progress))
                if not chains[-1].is_right:
                    break
        return Probe(span=span, chains=tuple(chains))

    def _run_chain(self, span: Span, *, whole: Span, progress: Progress) -> Chain:
        executor = self._executor
        next_layer = span.stop if span.stop < whole.stop else None
        num_bytes = executor.reader.num_bytes_read
        end: torch.Tensor | None = None
        for layer, output in run_chain(executor, self._golden, span, next_layer=next_layer):
            end = output
            self._counts.append(executor.runtime.count_compiles())
            progress.advance(layer, num_bytes=executor.reader.num_bytes_read - num_bytes)
            num_bytes = executor.reader.num_bytes_read
        assert end is not None, "a span is never empty"
        return self._judge.judge(span, end)
