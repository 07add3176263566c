"""DeviceRun: carries out a run on a device, from the first layer's input to the capture.

The *span* is the range of layers that are captured. The *lead-in*, if there is one, is the layers before it: they run
from the tokens to the span's input. B batch, S sequence, H hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minimax_tools.capture.further import ALSO
from minimax_tools.capture.manifest import Description
from minimax_tools.capture.passes import GENERATION_NAME, Generation
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.capture.writer import CaptureWriter, open_capture
from minimax_tools.checkpoint.filling import Gathered
from minimax_tools.checkpoint.fingerprint import fingerprint_model
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import TargetError
from minimax_tools.json_codec import encode
from minimax_tools.machine.progress import NoProgress, Progress
from minimax_tools.model.inputs import decoded_columns
from minimax_tools.model.run import Mode
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import EMBEDDING, FINAL_NORM, head_name
from minimax_tools.text.tokenizer import decode_if_possible
from neuron.builtin.layer import KeyValues
from neuron.builtin.modules import RMSNorm, UndrawnLinear
from neuron.devices.runtime import Runtime
from neuron.devices.weights import Weight
from neuron.runs.device_request import DeviceRequest, GoldenInputs
from neuron.runs.executor import LayerExecutor
from neuron.runs.generation import generate_greedily, run_decoding
from neuron.runs.layer_run import LayerInput, LayerRequest, LayerRun
from neuron.runs.run_profile import CaptureEffect, CompileReport, Profiler, RunReport


class DeviceHead(nn.Module):
    """Final norm and lm_head."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(spec.hidden_size, spec).to(dtype)
        self.lm_head = UndrawnLinear(spec.hidden_size, spec.vocab_size, dtype=dtype)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute final_norm [B,S,H] and logits [B,S,vocab], in the weights' dtype, from [B,S,H] of any dtype."""
        normed = self.norm(hidden_states).to(self.lm_head.weight.dtype)
        return normed, self.lm_head(normed)


def embed_tokens(reader: CheckpointReader, input_ids: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Compute the embedding [B,S,H] of tokens [B,S] on the CPU; its weights are freed at return."""
    return nn.functional.embedding(input_ids, reader.read_weight(EMBEDDING, dtype))


def run_head(hidden_states: torch.Tensor, *, executor: LayerExecutor) -> Mapping[ModelSite, torch.Tensor]:
    """Compute final_norm [B,S,H] and logits [B,S,vocab] from the last layer's output [B,S,H].

    The device computes; both are returned on the CPU. The weights are freed at return.
    """
    spec, dtype = executor.setup.spec, executor.setup.dtype
    reader, runtime, loader = executor.reader, executor.runtime, executor.loader
    module = DeviceHead(spec, dtype=dtype)
    names = {"norm.weight": FINAL_NORM, "lm_head.weight": head_name(spec)}
    weights: dict[str, Weight] = {
        name: Gathered.whole(stored, reader.index[stored].shape, reader.read_weight_into)
        for name, stored in names.items()
    }
    loader.load(module, weights, what="the model's head")
    loader.release()  # frees the host's buffers: no further module is loaded
    with torch.no_grad():
        # A port's float32 is not rounded before the norm: the noise of logits has no such rounding.
        read_in = torch.promote_types(hidden_states.dtype, dtype)
        normed, logits = module(hidden_states.to(runtime.device, read_in))
    runtime.synchronise()
    return {ModelSite.FINAL_NORM: normed.to("cpu"), ModelSite.LOGITS: logits.to("cpu")}


class DeviceRun:
    """A run on a device, to be carried out once; `progress` shows every layer."""

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
        self._executor = LayerExecutor(request, runtime=runtime, reader=reader)
        self._model = fingerprint_model(reader, request.spec, request.run.span)
        self._golden = GoldenInputs(golden=request.golden, run=request.run) if request.golden else None
        if self._golden is not None:
            self._golden.verify(model=self._model, dtype=request.dtype)
        # Compile counts before the first layer that ran, and after each.
        self._counts = [runtime.count_compiles()]
        # Bytes read up to the last layer that the progress shows.
        self._num_bytes_shown = reader.num_bytes_read
        self._effects: list[CaptureEffect] = []
        self._profiler = Profiler(runtime) if request.profiles else None

    def capture(self, directory: Path) -> RunReport:
        """Run and write the capture; a killed run resumes after its last whole layer.

        One layer and its activations are in memory at a time: the layer's sites are freed when they are written.
        """
        request, compiler = self._request, self._runtime.compiler
        with (
            self._executor,
            self._profiler or nullcontext(),
            open_capture(
                directory, self.describe(), inputs=request.inputs, hidden_states=self._input_to_store()
            ) as writer,
        ):
            self._show_done(writer)
            self._run_layers(writer)
            if request.run.model_sites and not writer.has_model_sites:
                self._run_head(writer)
            writer.finish()
            generation_error = self._try_to_generate(writer) if request.max_new_tokens else None
        return RunReport(
            compiles=CompileReport.of(self._counts, compiler=compiler and str(compiler)),
            effects=tuple(self._effects) if request.checks_capture else None,
            profile=tuple(self._profiler.layers) if self._profiler else None,
            num_layers=request.num_layers,
            generation_error=generation_error,
        )

    def _show_done(self, writer: CaptureWriter) -> None:
        """Show as skipped the layers that an earlier run finished, and the lead-in, whose output that run stored."""
        if writer.complete_layers:
            for layer in (*self._request.lead_in, *writer.complete_layers):
                self._progress.skip(layer)

    def _run_layers(self, writer: CaptureWriter) -> None:
        """Run the layers that are not stored yet, and store their sites."""
        run = self._request.run
        pending = [layer for layer in run.span if layer not in writer.complete_layers]
        for layer, next_layer in zip(pending, [*pending[1:], None], strict=False):
            result = self._run_layer(layer, self._input_of(layer, writer), next_layer=next_layer)
            # In a chained run, another layer's input is the output that is stored already.
            keeps_input = run.mode is Mode.ISOLATED or layer == run.span.start
            tensors = result.tensors.items()
            writer.write(
                layer,
                {site: tensor for site, tensor in tensors if keeps_input or site is not Site.INPUT},
                further=result.further,
                not_exposed=result.not_exposed,
                num_calls=result.num_calls,
                observed_dtypes=result.router_dtypes,
                held_weights=result.held_weights,
            )
            self._show(layer)

    def _input_of(self, layer: int, writer: CaptureWriter) -> torch.Tensor:
        if layer == self._request.run.span.start:
            return self._first_input(writer)
        if self._request.run.mode is Mode.CHAINED:
            return writer.capture.read(layer - 1, Site.OUTPUT)
        assert self._golden is not None, "a sweep has a golden"
        return self._golden.layer_input(layer)

    def _run_layer(self, layer: int, hidden_states: torch.Tensor, *, next_layer: int | None) -> LayerRun:
        """Run one layer, and once more without recording if the user asked for it; measure what the report needs.

        Every site of the run that the layer has is recorded, even for the lead-in, so that layers of one kind share
        their graphs.
        """
        request, golden = self._request, self._golden
        layer_request = LayerRequest(
            layer=layer,
            layer_input=LayerInput.of(hidden_states, request.inputs),
            sites=request.run.sites_of(layer),
            further=request.further,
            border=golden.border(layer) if golden else {},  # values that a component is given
            # Generation needs keys and values: a port that returns none is refused at the first layer.
            keeps_past=request.run.num_decoded > 0 or request.max_new_tokens > 1,
            next_layer=next_layer,
            calls=request.inputs.plan_calls(),
        )
        if request.stage_feed is not None:
            layer_request = request.stage_feed(layer_request, self._executor.run)
        past = golden.past(layer) if golden else None
        started_s = time.perf_counter()
        result = self._run_passes(layer_request, past)
        if self._profiler is not None:
            self._profiler.add(layer, started_s, result.times)
        if request.checks_capture:
            unrecorded = self._run_passes(replace(layer_request, sites=(), further=()), past)
            self._effects.append(CaptureEffect.between(layer, result.output, unrecorded.output))
        self._counts.append(self._runtime.count_compiles())
        return result

    def _run_passes(self, layer_request: LayerRequest, past: KeyValues | None) -> LayerRun:
        """Run all tokens in one pass; if the run decodes, the last ones one by one, from the golden's `past` if any."""
        num_decoded = self._request.run.num_decoded
        if not num_decoded:
            return self._executor.run(layer_request)
        return run_decoding(
            lambda layer_input: self._executor.run(replace(layer_request, layer_input=layer_input)),
            layer_request.layer_input,
            columns=decoded_columns(self._request.inputs.attention_mask, num_decoded),
            sites=layer_request.sites,
            past=past,
        )

    def _show(self, layer: int) -> None:
        num_bytes_read = self._reader.num_bytes_read
        self._progress.advance(layer, num_bytes=num_bytes_read - self._num_bytes_shown)
        self._num_bytes_shown = num_bytes_read

    def _run_head(self, writer: CaptureWriter) -> None:
        span = self._request.run.span
        head = self._compute_head(writer.capture.read(span.last, Site.OUTPUT))
        writer.write(None, {ModelSite.EMBEDDING: writer.capture.read(span.start, Site.INPUT), **head})

    def _compute_head(self, hidden_states: torch.Tensor) -> Mapping[ModelSite, torch.Tensor]:
        """Compute final_norm and logits from the last layer's output [B,S,H], once the layer's weights are freed."""
        self._executor.release()
        self._request.budget.require(self._executor.footprint.head_bytes, "the lm_head and its logits")
        return run_head(hidden_states, executor=self._executor)

    def _try_to_generate(self, writer: CaptureWriter) -> str | None:
        """Generate tokens and store them; if the port cannot, return why: its capture is complete, and is judged."""
        request = self._request
        try:
            generated = generate_greedily(
                request,
                Capture.open(writer.directory),
                embed=self._embed,
                run_layer=self._executor.run,
                read_logits=lambda hidden_states: self._compute_head(hidden_states)[ModelSite.LOGITS],
            )
        except TargetError as error:
            return str(error)
        sampling = {"do_sample": False, "max_new_tokens": request.max_new_tokens}
        texts = decode_if_possible(request.folder, generated)
        generation = Generation.of(request.inputs, generated, sampling=sampling, texts=texts)
        writer.write_json(GENERATION_NAME, encode(generation))
        return None

    def _input_to_store(self) -> torch.Tensor | Callable[[], torch.Tensor] | None:
        """Return the span's input [B,S,H] for the capture; None if it is the tokens' embedding.

        The lead-in is returned as a function: a resumed capture holds its output already, and does not call it.
        """
        if self._request.lead_in:
            return self._run_lead_in
        return self._given_input() if self._request.random_input or self._request.run.span.start else None

    def _first_input(self, writer: CaptureWriter) -> torch.Tensor:
        if self._request.lead_in:
            return writer.read_hidden_states()
        given = self._given_input()
        return self._embed(self._request.inputs.input_ids) if given is None else given

    def _given_input(self) -> torch.Tensor | None:
        """Return the golden's or the random input [B,S,H] of the span, on the CPU; None if tokens give the input."""
        request = self._request
        # `needed` lists what the run takes from the golden: nothing for the whole model, which begins with the tokens.
        if self._golden is not None and self._golden.needed():
            return self._golden.layer_input(request.run.span.start)
        if request.random_input:
            shape = (request.inputs.batch_size, request.inputs.sequence_length, request.spec.hidden_size)
            generator = torch.Generator().manual_seed(request.seed)
            return torch.randn(shape, generator=generator).to(request.dtype)
        return None

    def _run_lead_in(self) -> torch.Tensor:
        hidden_states = self._embed(self._request.inputs.input_ids)
        for layer in self._request.lead_in:
            hidden_states = self._run_layer(layer, hidden_states, next_layer=layer + 1).output
            self._show(layer)
        return hidden_states

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        self._request.budget.require(self._executor.footprint.embedding_bytes, "reading the embedding")
        return embed_tokens(self._reader, input_ids, dtype=self._request.dtype)

    def _input_source(self) -> str:
        request, first = self._request, self._request.run.span.start
        if self._golden is not None:
            golden = self._golden.description
            return golden if self._golden.needed() else f"tokens of the {golden}"
        if request.random_input:
            return f"random numbers of seed {request.seed}"
        through = f" through layers 0 to {first - 1}" if first > 0 else ""
        return f"tokens{through}: {request.inputs.source}"

    def describe(self) -> Description:
        """Describe all that decides the run's numbers: a run resumes only if its capture has the same description."""
        request = self._request
        options: dict[str, Any] = {"golden_inputs": self._golden.digest()} if self._golden else {}
        if request.lead_in:
            # `self._model` covers the span alone, and the lead-in decides the span's input.
            lead_in = fingerprint_model(self._reader, request.spec, Span(0, request.run.span.start))
            options["layers_before"] = encode(lead_in)["layers"]
        if request.replaced:
            options["replaced"] = [str(site) for site in request.replaced]
        if request.further:
            options[ALSO] = [str(place) for place in request.further]
        return Description(
            side=DEVICE_SIDE,
            run=request.run,
            provenance=request.provenance(self._runtime, model=self._model, options=options),
            inputs_digest=request.inputs.digest(),
            is_quick=request.inputs.is_quick,
            expert_tokens=request.inputs.expert_tokens,
            last_tokens=request.inputs.last_tokens,
            calls=request.inputs.plan_calls(),
            input_source=self._input_source(),
        )
