"""DeviceRun: carries out a run on a device, from the source of the hidden states to the capture."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minimax_tools.capture.generation import GENERATION_NAME, Generation
from minimax_tools.capture.manifest import Description, dtype_name
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.capture.writer import CaptureWriter, open_capture
from minimax_tools.checkpoint.fingerprint import ModelFingerprint
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.progress import NoProgress, Progress
from minimax_tools.errors import TargetError
from minimax_tools.json_codec import encode
from minimax_tools.model.inputs import decoded_rows
from minimax_tools.model.run import Mode
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import Span
from minimax_tools.provenance import Provenance
from minimax_tools.text.tokenizer import read_end_tokens
from neuron.builtin.layer import KeyValues
from neuron.devices.runtime import Runtime
from neuron.runs.decoding import run_decoding
from neuron.runs.device_request import DeviceRequest
from neuron.runs.executor import LayerExecutor
from neuron.runs.generation import Model, generate_greedily
from neuron.runs.golden_feed import GoldenFeed
from neuron.runs.head import embed_tokens, run_head
from neuron.runs.layer_input import LayerInput
from neuron.runs.layer_run import LayerRun
from neuron.runs.run_profile import Profiler
from neuron.runs.run_report import CaptureEffect, CompileReport, RunReport


class DeviceRun:
    """One run on one device, made to be carried out once.

    Args:
        request: What to run.
        runtime: The device.
        reader: The checkpoint.
        progress: Told of every layer; None where nobody watches.

    Raises:
        IncomparableError: The golden is of another model or dtype, or lacks what the run is fed.
    """

    def __init__(
        self,
        request: DeviceRequest,
        *,
        runtime: Runtime,
        reader: CheckpointReader,
        progress: Progress | None = None,
    ) -> None:
        self._request = request
        self._runtime = runtime
        self._reader = reader
        self._progress = progress or NoProgress()
        self._executor = LayerExecutor(
            target=request.target,
            runtime=runtime,
            reader=reader,
            spec=request.spec,
            dtype=request.dtype,
            inputs=request.inputs,
            budget=request.budget,
            prefetch=request.prefetch,
        )
        self._model = ModelFingerprint.of(reader, request.spec, request.run.span)
        self._feed = GoldenFeed(golden=request.golden, run=request.run) if request.golden else None
        if self._feed is not None:
            self._feed.verify(model=self._model, dtype=request.dtype)
        # Compile counts before the first layer that ran, and after each.
        self._counts = [runtime.count_compiles()]
        # What was read up to the last layer that was told of.
        self._num_bytes_told = reader.num_bytes_read
        self._effects: list[CaptureEffect] = []
        self._profiler = Profiler(runtime) if request.profiles else None

    def capture(self, directory: Path) -> RunReport:
        """Run and write the capture; a killed run resumes after its last whole layer.

        What is in memory at once is one layer, and what it computes: its sites are freed when they are written.

        Raises:
            CaptureError: The directory is in use, holds something else, or the disk is full.
            CheckpointError: A layer's tensors cannot be read.
            TargetError: The port could not be built, loaded or run.
            MemoryBudgetError: The budget would be broken.
        """
        request = self._request
        with (
            self._executor,
            self._profiler or nullcontext(),
            open_capture(
                directory, self._describe(), inputs=request.inputs, hidden_states=self._hidden_states()
            ) as writer,
        ):
            self._skip_done(writer)
            if request.run.mode is Mode.ISOLATED:
                self._run_isolated(writer)
            else:
                self._run_chained(writer)
            writer.finish()
            generation_error = self._try_to_generate(writer) if request.max_new_tokens else None
        return RunReport(
            compiles=CompileReport.of(self._counts),
            effects=tuple(self._effects) if request.checks_capture else None,
            profile=self._profiler.layers if self._profiler else None,
            num_layers=request.num_layers,
            generation_error=generation_error,
        )

    def _run_isolated(self, writer: CaptureWriter) -> None:
        for layer, then in _with_next(self._pending(writer)):
            if self._feed is None:
                self._run_layer(writer, layer, self._span_input(writer), then=then)
            else:
                hidden_states = self._feed.read(layer, Site.INPUT)
                self._run_layer(
                    writer,
                    layer,
                    hidden_states,
                    feeds=self._feed.border(layer),
                    past=self._feed.past(layer),
                    then=then,
                )

    def _run_chained(self, writer: CaptureWriter) -> None:
        run = self._request.run
        for layer, then in _with_next(self._pending(writer)):
            is_first = layer == run.span.start
            hidden_states = self._span_input(writer) if is_first else writer.read_layer_output(layer - 1)
            # The other layers' input is the output that is stored already.
            self._run_layer(writer, layer, hidden_states, keep_input=is_first, then=then)
        if run.model_sites and not writer.has_model_sites:
            self._run_head(writer)

    def _pending(self, writer: CaptureWriter) -> tuple[int, ...]:
        """The layers still to run; in a chained run they follow each other, after those that are stored."""
        return tuple(layer for layer in self._request.run.span if layer not in writer.complete_layers)

    def _skip_done(self, writer: CaptureWriter) -> None:
        """Tell of the layers that an earlier run did; the lead-in is told of where it runs."""
        if writer.complete_layers:
            for layer in (*self._request.lead_in, *writer.complete_layers):
                self._progress.skip(layer)

    def _run_layer(
        self,
        writer: CaptureWriter,
        layer: int,
        hidden_states: torch.Tensor,
        *,
        keep_input: bool = True,
        feeds: Mapping[Site, torch.Tensor] | None = None,
        past: KeyValues | None = None,
        then: int | None,
    ) -> None:
        """Run one layer and store its sites."""
        result = self._execute(layer, hidden_states, feeds=feeds, past=past, then=then)
        kept = {
            site: tensor for site, tensor in result.tensors.items() if keep_input or site is not Site.INPUT
        }
        writer.write_layer(layer, kept, not_exposed=result.not_exposed, observed_dtypes=result.router_dtypes)
        self._tell_of(layer)

    def _execute(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        *,
        feeds: Mapping[Site, torch.Tensor] | None = None,
        past: KeyValues | None = None,
        then: int | None,
    ) -> LayerRun:
        """Run one layer, every site of the run recorded, needed or not: so all layers share their graphs."""
        request = self._request
        whole = LayerInput.of(hidden_states, request.inputs)
        num_decoded = request.run.decode_rows

        # A port that generates is asked for its keys and values from the first layer on: what it lacks is told there.
        keeps_past = num_decoded > 0 or request.max_new_tokens > 1

        def run(sites: tuple[Site, ...]) -> LayerRun:
            once = partial(
                self._executor.run, layer, sites=sites, feeds=feeds, keeps_past=keeps_past, then=then
            )
            if not num_decoded:
                return once(whole)
            rows = decoded_rows(request.inputs.attention_mask, num_decoded)
            return run_decoding(once, whole, rows=rows, sites=sites, given=past)

        started_s = time.perf_counter()
        result = run(request.run.sites)
        if self._profiler is not None:
            self._profiler.keep(layer, started_s, result.times)
        if request.checks_capture:
            self._effects.append(CaptureEffect.between(layer, result.output, run(()).output))
        self._counts.append(self._runtime.count_compiles())
        return result

    def _tell_of(self, layer: int) -> None:
        num_bytes_read = self._reader.num_bytes_read
        self._progress.advance(layer, num_bytes=num_bytes_read - self._num_bytes_told)
        self._num_bytes_told = num_bytes_read

    def _run_head(self, writer: CaptureWriter) -> None:
        """Store the sites outside the layers, when the last layer is stored."""
        span = self._request.run.span
        head = self._compute_head(writer.read_layer_output(span.last))
        writer.write_model({ModelSite.EMBEDDING: writer.read_layer_input(span.start), **head})

    def _compute_head(self, hidden_states: torch.Tensor) -> Mapping[ModelSite, torch.Tensor]:
        """final_norm and logits of the last layer's output [B,S,H], when the layer's weights are gone."""
        self._executor.release()
        self._executor.limits.allow_head()
        return run_head(
            hidden_states,
            reader=self._reader,
            spec=self._request.spec,
            runtime=self._runtime,
            loader=self._executor.loader,
            dtype=self._request.dtype,
        )

    def _try_to_generate(self, writer: CaptureWriter) -> str | None:
        """Why nothing was generated: what was captured is whole, and can be judged, all the same."""
        try:
            self._generate(writer)
        except TargetError as error:
            return str(error)
        return None

    def _generate(self, writer: CaptureWriter) -> None:
        """Store how the rows go on."""
        request = self._request

        def run_layer(layer: int, given: LayerInput, then: int | None) -> LayerRun:
            # A whole pass has the graphs of the run that was captured.
            sites = request.run.sites if given.past is None else ()
            return self._executor.run(layer, given, sites=sites, keeps_past=True, then=then)

        model = Model(
            embed=self._embed,
            run_layer=run_layer,
            read_logits=lambda hidden_states: self._compute_head(hidden_states)[ModelSite.LOGITS],
        )
        generated = generate_greedily(
            model,
            Capture.open(writer.directory),
            request.inputs,
            num_tokens=request.max_new_tokens,
            end_tokens=read_end_tokens(request.folder),
            spec=request.spec,
            budget=request.budget,
        )
        sampling = {"do_sample": False, "max_new_tokens": request.max_new_tokens}
        generation = Generation.of(request.inputs, generated, sampling=sampling, folder=request.folder)
        writer.write_json(GENERATION_NAME, encode(generation))

    def _hidden_states(self) -> torch.Tensor | Callable[[], torch.Tensor] | None:
        """What the capture keeps as its first layer's input: nothing where the tokens tell it."""
        if self._request.lead_in:
            return self._run_lead_in
        return self._given_input() if self._request.random_input or self._request.run.span.start else None

    def _span_input(self, writer: CaptureWriter) -> torch.Tensor:
        """The first layer's input [B,S,H] on the CPU."""
        if self._request.lead_in:
            return writer.read_hidden_states()
        given = self._given_input()
        return self._embed(self._request.inputs.input_ids) if given is None else given

    def _given_input(self) -> torch.Tensor | None:
        """The first layer's input [B,S,H] on the CPU, where it is not made of the tokens."""
        request = self._request
        if self._feed is not None and self._feed.needed():
            return self._feed.read(request.run.span.start, Site.INPUT)
        if request.random_input:
            shape = (request.inputs.batch_size, request.inputs.sequence_length, request.spec.hidden_size)
            generator = torch.Generator().manual_seed(request.seed)
            return torch.randn(shape, generator=generator).to(request.dtype)
        return None

    def _run_lead_in(self) -> torch.Tensor:
        """What the layers before the span make of the tokens: [B,S,H] on the CPU."""
        hidden_states = self._embed(self._request.inputs.input_ids)
        for layer in self._request.lead_in:
            hidden_states = self._execute(layer, hidden_states, then=layer + 1).output
            self._tell_of(layer)
        return hidden_states

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        self._executor.limits.allow_embedding()
        return embed_tokens(self._reader, input_ids, dtype=self._request.dtype)

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
        if request.lead_in:
            # They make the input, and belong to no span: where they differ, nothing stored is gone on with.
            before = ModelFingerprint.of(self._reader, request.spec, Span(0, request.run.span.start))
            options["layers_before"] = encode(before)["layers"]
        options |= request.target.sharing(self._runtime)
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


def _with_next(layers: tuple[int, ...]) -> Iterator[tuple[int, int | None]]:
    """Each layer with the one that follows; None after the last."""
    return zip(layers, (*layers[1:], None), strict=False) if layers else iter(())
