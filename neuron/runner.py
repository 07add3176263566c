"""DeviceRun: carries out a run on a device, from the source of the hidden states to the capture."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from minimax_tools.capture.manifest import Description, dtype_name
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.capture.writer import CaptureWriter, open_capture
from minimax_tools.checkpoint.fingerprint import ModelFingerprint
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import IncomparableError, UsageError
from minimax_tools.inputs import Inputs
from minimax_tools.provenance import Provenance
from minimax_tools.run import Mode, Run
from minimax_tools.sites import ModelSite, Site
from minimax_tools.spec import ModelSpec
from neuron.executor import LayerExecutor
from neuron.head import embed_tokens, run_head
from neuron.runtime import CompileCounts, Runtime
from neuron.targets import Target

logger = logging.getLogger(__name__)


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
            raise UsageError("--random-input and --golden were both given", next_step="Use one of them.")
        if self.golden is None and self.run.mode is Mode.ISOLATED and len(self.run.span) > 1:
            raise UsageError("a sweep feeds every layer the golden's own input", next_step="Give --golden DIR.")
        if self.golden is None and self.run.component is not None:
            raise UsageError("a component is fed the golden's values", next_step="Give --golden DIR.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """How many graphs the first layer compiled, how many the others, and what fell back to the CPU."""

    first_layer: int
    later_layers: int
    fallbacks: tuple[str, ...]


class DeviceRun:
    """One run on one device.

    Args:
        request: What to run.
        runtime: The device.
        reader: The checkpoint.
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
        self._counts: list[CompileCounts] = []
        self._source, self._first_input = self._find_source()

    def capture(self, directory: Path) -> CompileReport:
        """Run and write the capture; a killed run resumes after its last whole layer.

        Raises:
            CaptureError: The directory is in use, holds something else, or the disk is full.
            TargetError: The port could not be built, loaded or run.
        """
        with open_capture(
            directory, self._describe(), inputs=self._request.inputs, hidden_states=self._stored_input()
        ) as writer:
            if self._request.run.mode is Mode.ISOLATED:
                self._run_isolated(writer)
            else:
                self._run_chained(writer)
            writer.finish()
        return self._compile_report()

    def _run_isolated(self, writer: CaptureWriter) -> None:
        run = self._request.run
        for layer in run.span:
            if layer not in writer.complete_layers:
                hidden_states = self._isolated_input(layer)
                feeds = {site: self._golden_tensor(layer, site) for site in run.fed_sites if site is not Site.INPUT}
                self._run_layer(writer, layer, hidden_states, keep_input=True, feeds=feeds)

    def _run_chained(self, writer: CaptureWriter) -> None:
        run = self._request.run
        hidden_states = self._first_input
        for layer in run.span:
            if layer in writer.complete_layers:
                hidden_states = writer.read_layer_output(layer)
            else:
                hidden_states = self._run_layer(writer, layer, hidden_states, keep_input=layer == run.span.start)
        if run.model_sites:
            tensors = run_head(
                hidden_states,
                reader=self._reader,
                spec=self._request.spec,
                runtime=self._runtime,
                dtype=self._request.dtype,
            )
            writer.write_model({ModelSite.EMBEDDING: self._first_input, **tensors})

    def _run_layer(
        self,
        writer: CaptureWriter,
        layer: int,
        hidden_states: torch.Tensor,
        *,
        keep_input: bool,
        feeds: Mapping[Site, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run one layer, store its sites, and return its output on the device."""
        sites = tuple(site for site in self._request.run.sites if site is not Site.INPUT or keep_input)
        result = self._executor.run(layer, hidden_states, sites=sites, feeds=feeds)
        writer.write_layer(
            layer, result.tensors, not_exposed=result.not_exposed, observed_dtypes=result.router_dtypes
        )
        self._counts.append(self._runtime.count_compiles())
        logger.info("Layer %d: %d sites captured on %s.", layer, len(result.tensors), self._runtime.backend)
        return result.output

    def _find_source(self) -> tuple[str, torch.Tensor]:
        """Where the first layer's input comes from, in words, and the input [B,S,H] itself."""
        request, first = self._request, self._request.run.span.start
        if request.golden is not None and not (first == 0 and request.run.model_sites):
            return f"golden {request.golden.description.run.name}", self._golden_tensor(first, Site.INPUT)
        if request.random_input:
            shape = (request.inputs.batch_size, request.inputs.sequence_length, request.spec.hidden_size)
            generator = torch.Generator().manual_seed(request.seed)
            return f"random numbers of seed {request.seed}", torch.randn(shape, generator=generator).to(request.dtype)
        hidden_states = embed_tokens(self._reader, request.inputs, dtype=request.dtype)
        if first == 0:
            return f"tokens: {request.inputs.source}", hidden_states
        for layer in range(first):
            hidden_states = self._executor.run(layer, hidden_states, sites=()).output
            logger.info("Layer %d run to make the input of layer %d.", layer, first)
        return f"tokens through layers 0 to {first - 1}: {request.inputs.source}", hidden_states.to("cpu")

    def _isolated_input(self, layer: int) -> torch.Tensor:
        return self._first_input if layer == self._request.run.span.start else self._golden_tensor(layer, Site.INPUT)

    def _golden_tensor(self, layer: int, site: Site) -> torch.Tensor:
        golden = self._request.golden
        assert golden is not None, "only runs with a golden ask for its tensors"
        if golden.entry(layer, site) is None:
            raise IncomparableError(
                f"the golden {golden.directory} holds no {site} of layer {layer}",
                found=f"layers {_listed(golden.layers)}, captured with {len(golden.description.run.sites)} sites",
                next_step="Capture it with mm2-gpu extract-all --sites all, or choose a layer it has.",
            )
        return golden.read(layer, site)

    def _stored_input(self) -> torch.Tensor | None:
        """The first layer's input where it is not made of the tokens alone."""
        return self._first_input if self._request.run.span.start > 0 or self._request.random_input else None

    def _describe(self) -> Description:
        request = self._request
        return Description(
            side=DEVICE_SIDE,
            run=request.run,
            provenance=Provenance(
                model=ModelFingerprint.of(self._reader, request.spec, request.run.span),
                model_source=request.model_source,
                backend=str(self._runtime.backend),
                device=self._runtime.description,
                dtypes={"weights": dtype_name(request.dtype)},
                target=request.target.name,
                target_digest=request.target.source_digest,
            ),
            inputs_digest=request.inputs.digest(),
            input_source=self._source,
        )

    def _compile_report(self) -> CompileReport:
        if not self._counts:
            return CompileReport(first_layer=0, later_layers=0, fallbacks=())
        first, last = self._counts[0], self._counts[-1]
        return CompileReport(
            first_layer=first.compiles, later_layers=last.compiles - first.compiles, fallbacks=last.fallbacks
        )


def _listed(layers: tuple[int, ...]) -> str:
    return f"{layers[0]} to {layers[-1]}" if layers else "none"
