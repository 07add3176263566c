"""ChainRunner: runs layers one after the other from the golden's input, and keeps nothing but what they put out.

One runner serves many chains: the resident layer, its graphs and the device stay from one to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType

import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.fingerprint import ModelFingerprint
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.model.run import sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from neuron.devices.runtime import Runtime
from neuron.ports.target import Target
from neuron.runs.executor import LayerExecutor
from neuron.runs.golden_feed import GoldenFeed
from neuron.runs.layer_input import LayerInput


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRequest:
    """What runs in chains.

    Args:
        spec: The model.
        golden: Where the chains' inputs come from.
        target: The implementation that runs.
        dtype: Dtype of weights and activations.
        prefetch: Whether the next layer is fetched from the disk while one runs; None for where memory holds it.
        budget: What anonymous memory may be taken.
    """

    spec: ModelSpec
    golden: Capture
    target: Target
    dtype: torch.dtype
    prefetch: bool | None = None
    budget: MemoryBudget = field(default_factory=MemoryBudget.unlimited)

    def verify(self, span: Span, *, model: ModelFingerprint) -> None:
        """Check that the golden is of this model and dtype, and holds the input of every layer of `span`.

        Raises:
            IncomparableError: It is not, or does not.
        """
        run = sweep_run(span, sites_level="layer")
        GoldenFeed(golden=self.golden, run=run).verify(model=model, dtype=self.dtype)


class ChainRunner:
    """Runs chains of a target's layers; a context manager, whose threads end with the block.

    Args:
        request: What to run.
        runtime: The device.
        reader: The checkpoint.
    """

    def __init__(self, request: ChainRequest, *, runtime: Runtime, reader: CheckpointReader) -> None:
        self._golden = request.golden
        self._inputs = request.golden.read_inputs()
        self._executor = LayerExecutor(
            target=request.target,
            runtime=runtime,
            reader=reader,
            spec=request.spec,
            dtype=request.dtype,
            inputs=self._inputs,
            budget=request.budget,
            prefetch=request.prefetch,
        )

    def __enter__(self) -> ChainRunner:
        self._executor.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._executor.__exit__(kind, error, traceback)

    def run_layers(self, span: Span, *, then: int | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Each layer of a chain and its output [B,S,H] on the CPU; the first is fed the golden's input.

        Args:
            span: The layers.
            then: The layer that will run after them, to be read ahead.

        Raises:
            CaptureError: The golden's input cannot be read.
            CheckpointError: A layer's tensors cannot be read.
            TargetError: The port could not be built, loaded or run.
            MemoryBudgetError: The budget would be broken.
        """
        states = self._golden.read(span.start, Site.INPUT)
        for layer in span:
            following = layer + 1 if layer < span.last else then
            # No sites: what a port shows plays no part here, and all chains share their graphs.
            given = LayerInput.of(states, self._inputs)
            states = self._executor.run(layer, given, sites=(), then=following).output
            yield layer, states
