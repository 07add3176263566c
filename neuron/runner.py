"""DeviceRun: carries out a run on a device, from the source of the hidden states to the capture."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minimax_tools.capture.manifest import Description, dtype_name
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.capture.writer import CaptureWriter, open_capture
from minimax_tools.checkpoint.fingerprint import ModelFingerprint
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import UsageError
from minimax_tools.inputs import Inputs
from minimax_tools.provenance import Provenance
from minimax_tools.run import Mode, Run
from minimax_tools.sites import ModelSite, Site
from minimax_tools.spec import ModelSpec
from neuron.executor import LayerExecutor, LayerRun
from neuron.golden_feed import GoldenFeed
from neuron.head import embed_tokens, run_head
from neuron.runtime import Runtime
from neuron.targets import Target

logger = logging.getLogger(__name__)

_GIVE_GOLDEN = "Give --golden DIR; mm2-gpu extract-all makes one."


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequest:
    """A device run before it starts.

    Args:
        folder: The checkpoint.
        spec: Its quantities.
        model_source: The model as the user named it.
        run: Layers, mode and sites.
        inputs: The token rows.
        dtype: Dtype of weights and activations.
        target: The implementation that runs.
        golden: Where the layers' inputs come from; None for tokens or random numbers.
        random_input: Whether the first layer is fed random numbers.
        seed: Their seed.
    """

    folder: Path
    spec: ModelSpec
    model_source: str
    run: Run
    inputs: Inputs
    dtype: torch.dtype
    target: Target
    golden: Capture | None = None
    random_input: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.random_input and self.golden is not None:
            raise UsageError(
                "--random-input and --golden were both given: no golden can judge what random numbers give",
                next_step="Use one of them.",
            )
        if self.random_input and self.run.model_sites:
            raise UsageError(
                "--random-input leaves no embedding for a whole-model run to capture",
                next_step="Use --seq-len for random tokens, or mm2-test multi-layer --random-input.",
            )
        if self.golden is None and self.run.mode is Mode.ISOLATED and len(self.run.span) > 1:
            raise UsageError("a sweep feeds every layer the golden's own input", next_step=_GIVE_GOLDEN)
        if self.golden is None and self.run.component is not None:
            raise UsageError("a component is fed the golden's values at its border", next_step=_GIVE_GOLDEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """Graphs that the first layer to run compiled, those of the later ones, and what fell back to the CPU."""

    first_layer: int
    later_layers: int
    fallbacks: tuple[str, ...]


class DeviceRun:
    """One run on one device.

    Args:
        request: What to run.
        runtime: The device.
        reader: The checkpoint.

    Raises:
        IncomparableError: The golden is of another model or dtype, or lacks what the run is fed.
    """

    def __init__(self, request: DeviceRequest, *, runtime: Runtime, reader: CheckpointReader) -> None:
        self._request = request
        self._runtime = runtime
        self._reader = reader
        self._executor = LayerExecutor(
            target=request.target,
            runtime=runtime,
            reader=reader,
            spec=request.spec,
            inputs=request.inputs,
            dtype=request.dtype,
        )
        self._model = ModelFingerprint.of(reader, request.spec, request.run.span)
        self._feed = GoldenFeed(golden=request.golden, run=request.run) if request.golden else None
        if self._feed is not None:
            self._feed.verify(model=self._model, dtype=request.dtype)
        # Compile counts before the first layer that ran, and after each.
        self._counts = [runtime.count_compiles()]

    def capture(self, directory: Path) -> CompileReport:
        """Run and write the capture; a killed run resumes after its last whole layer.

        Raises:
            CaptureError: The directory is in use, holds something else, or the disk is full.
            CheckpointError: A layer's tensors cannot be read.
            TargetError: The port could not be built, loaded or run.
        """
        request = self._request
        first_input = self._first_input()
        is_stored = request.random_input or request.run.span.start > 0
        with open_capture(
            directory,
            self._describe(),
            inputs=request.inputs,
            hidden_states=first_input if is_stored else None,
        ) as writer:
            if request.run.mode is Mode.ISOLATED:
                self._run_isolated(writer, first_input)
            else:
                self._run_chained(writer, first_input)
            writer.finish()
        return self._compile_report()

    def _run_isolated(self, writer: CaptureWriter, first_input: torch.Tensor) -> None:
        for layer in self._pending(writer):
            if self._feed is None:
                self._run_layer(writer, layer, first_input)
            else:
                hidden_states = self._feed.read(layer, Site.INPUT)
                self._run_layer(writer, layer, hidden_states, feeds=self._feed.border(layer))

    def _run_chained(self, writer: CaptureWriter, first_input: torch.Tensor) -> None:
        run = self._request.run
        for layer in self._pending(writer):
            is_first = layer == run.span.start
            hidden_states = first_input if is_first else writer.read_layer_output(layer - 1)
            # The other layers' input is the output that is stored already.
            self._run_layer(writer, layer, hidden_states, keep_input=is_first)
        if run.model_sites:
            head = self._run_head(writer.read_layer_output(run.span.last))
            writer.write_model({ModelSite.EMBEDDING: first_input, **head})

    def _pending(self, writer: CaptureWriter) -> tuple[int, ...]:
        """The layers still to run; in a chained run they follow each other, after those that are stored."""
        return tuple(layer for layer in self._request.run.span if layer not in writer.complete_layers)

    def _run_layer(
        self,
        writer: CaptureWriter,
        layer: int,
        hidden_states: torch.Tensor,
        *,
        keep_input: bool = True,
        feeds: Mapping[Site, torch.Tensor] | None = None,
    ) -> None:
        """Run one layer and store its sites."""
        result = self._execute(layer, hidden_states, feeds=feeds)
        kept = {
            site: tensor for site, tensor in result.tensors.items() if keep_input or site is not Site.INPUT
        }
        writer.write_layer(layer, kept, not_exposed=result.not_exposed, observed_dtypes=result.router_dtypes)
        logger.info("Layer %d: %d sites captured on %s.", layer, len(kept), self._runtime.backend)

    def _execute(
        self, layer: int, hidden_states: torch.Tensor, *, feeds: Mapping[Site, torch.Tensor] | None = None
    ) -> LayerRun:
        """Run one layer, every site of the run recorded, needed or not: so all layers share their graphs."""
        result = self._executor.run(layer, hidden_states, sites=self._request.run.sites, feeds=feeds)
        self._counts.append(self._runtime.count_compiles())
        return result

    def _run_head(self, hidden_states: torch.Tensor) -> Mapping[ModelSite, torch.Tensor]:
        """The sites after the layers, from the last layer's output."""
        return run_head(
            hidden_states,
            reader=self._reader,
            spec=self._request.spec,
            runtime=self._runtime,
            dtype=self._request.dtype,
        )

    def _first_input(self) -> torch.Tensor:
        """The first layer's input [B,S,H] on the CPU."""
        request, first = self._request, self._request.run.span.start
        if self._feed is not None and self._feed.needed():
            return self._feed.read(first, Site.INPUT)
        if request.random_input:
            shape = (request.inputs.batch_size, request.inputs.sequence_length, request.spec.hidden_size)
            generator = torch.Generator().manual_seed(request.seed)
            return torch.randn(shape, generator=generator).to(request.dtype)
        hidden_states = embed_tokens(self._reader, request.inputs, dtype=request.dtype)
        for layer in range(first):
            hidden_states = self._execute(layer, hidden_states).output
            logger.info("Layer %d run to make the input of layer %d.", layer, first)
        return hidden_states

    def _source(self) -> str:
        """Where the first layer's input comes from, in words."""
        request, first = self._request, self._request.run.span.start
        if self._feed is not None:
            golden = self._feed.description
            return golden if self._feed.needed() else f"tokens of the {golden}"
        if request.random_input:
            return f"random numbers of seed {request.seed}"
        through = f" through layers 0 to {first - 1}" if first > 0 else ""
        return f"tokens{through}: {request.inputs.source}"

    def _describe(self) -> Description:
        request = self._request
        options: dict[str, Any] = {"golden_inputs": self._feed.digest()} if self._feed else {}
        return Description(
            side=DEVICE_SIDE,
            run=request.run,
            provenance=Provenance(
                model=self._model,
                model_source=request.model_source,
                backend=str(self._runtime.backend),
                device=self._runtime.backend.description,
                dtypes={"weights": dtype_name(request.dtype)},
                target=request.target.name,
                target_digest=request.target.source_digest,
                options=options,
            ),
            inputs_digest=request.inputs.digest(),
            input_source=self._source(),
        )

    def _compile_report(self) -> CompileReport:
        start, first, last = self._counts[0], self._counts[min(1, len(self._counts) - 1)], self._counts[-1]
        return CompileReport(
            first_layer=first.since(start).compiles,
            later_layers=last.since(first).compiles,
            fallbacks=tuple(sorted(last.since(start).fallbacks)),
        )
