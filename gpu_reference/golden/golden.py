"""The golden capture: transformers' model run once, and written layer by layer with its noise floor.

1. `open_golden` loads or streams the model that a `GoldenRequest` names, and proves it.
2. `Golden.capture` runs the inputs, and records each layer as it runs.
3. `GoldenWriter` measures the layer's noise floor, and writes both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpu_reference.golden.golden_writer import GoldenWriter, kept_sites, running_only
from gpu_reference.golden.noise_floor import CheckpointTwinWeights, NoiseFloor, TwinWeights
from gpu_reference.golden.recording import recording_layers, recording_model
from gpu_reference.model.footprint import Footprint
from gpu_reference.model.model import GoldenModelRequest, load_golden_model
from gpu_reference.model.model_checks import prove_bare_model, prove_model, refuse_ragged_blocks
from gpu_reference.model.placement import describe_devices, input_device, watched_memory
from gpu_reference.streaming.stream_choice import MemoryRoom
from gpu_reference.streaming.streaming import OnceReader, Streaming, open_streamed_model
from minimax_tools.capture.manifest import Description
from minimax_tools.capture.store import GOLDEN_SIDE
from minimax_tools.capture.writer import CaptureWriter, open_capture
from minimax_tools.checkpoint.fingerprint import fingerprint_model, fingerprinted_names
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.layer_faults import verify_layer, warn_of_rounded_router
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.machine.progress import NoProgress, Progress
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.router import router_dtypes
from minimax_tools.model.run import Run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.weight_names import layer_prefix
from minimax_tools.partition.plan import Slice
from minimax_tools.provenance import ModelFingerprint, Provenance, plain_values
from minimax_tools.slices.stored_weights import read_slice_index
from minimax_tools.stored_dtype import dtype_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRequest:
    """A golden capture to make."""

    model: GoldenModelRequest
    model_source: str  # name of the model as the user gave it
    run: Run  # layers and sites to keep
    inputs: Inputs
    noise_floor: str  # `full` stores float32 twins and their distances, `stats` the distances, `off` neither
    # Names of the variants, other correct ways to compute a layer, whose errors widen the noise floor
    floor_variants: tuple[str, ...] = ()
    streaming: Streaming | None = None  # the way to stream; None to load the model whole
    budget: MemoryBudget = field(default_factory=MemoryBudget.unlimited)  # limit of anonymous memory

    @property
    def room(self) -> MemoryRoom:
        """The memory that the golden needs, and the memory that it may take."""
        return MemoryRoom(footprint=self.footprint, placement=self.model.placement, budget=self.budget)

    @property
    def part(self) -> Slice | None:
        """The slice of a plan that runs here; None for the whole model."""
        return None if self.streaming is None else self.streaming.part

    @property
    def footprint(self) -> Footprint:
        """The memory that the golden takes."""
        return Footprint(
            spec=self.model.spec,
            num_layers=self.model.num_hidden_layers,
            dtype=self.model.dtype,
            inputs=self.inputs,
            keeps_logits=ModelSite.LOGITS in self.run.model_sites,
            attn_implementation=self.model.attn_implementation,
            experts_implementation=self.model.experts_implementation,
            floor_variants=self.floor_variants,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Golden:
    """A golden model, loaded or streamed, proved and ready to run; made by `open_golden`."""

    request: GoldenRequest
    model: PreTrainedModel  # transformers' model
    reader: CheckpointReader  # reader of its checkpoint, which counts the bytes read
    weights: TwinWeights  # weights that the model computes with
    proved: tuple[str, ...]  # names of the proofs that the model passed

    def describe(self) -> Description:
        """Return the description that a capture of this golden begins with."""
        request = self.request
        backend, devices = describe_devices(self.model)
        options: dict[str, Any] = {
            "attn_implementation": request.model.attn_implementation,
            "experts_implementation": request.model.experts_implementation,
            "float32_matmul": torch.backends.cuda.matmul.fp32_precision,
            "bfloat16_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            "proved": list(self.proved),
        }
        return Description(
            side=GOLDEN_SIDE,
            run=request.run,
            provenance=Provenance(
                model=self._fingerprint(),
                model_source=request.model_source,
                backend=backend,
                device=devices,
                dtypes={
                    "weights": dtype_name(request.model.dtype),
                    **router_dtypes(request.model.spec.graph, dtype_name(request.model.dtype)),
                },
                target="transformers",
                options=options,
                model_config=plain_values(request.model.spec.raw),
            ),
            inputs_digest=request.inputs.digest(),
            is_quick=request.inputs.is_quick,
            expert_tokens=request.inputs.expert_tokens,
            last_tokens=request.inputs.last_tokens,
            input_source=request.inputs.source,
            noise_floor=request.noise_floor,
            floor_variants=request.floor_variants,
        )

    def capture(self, directory: Path, *, extra: Mapping[str, Any], progress: Progress | None = None) -> None:
        """Run the inputs once and write the capture; a killed capture resumes.

        `extra` are JSON values to store beside the tensors, by file name.
        """
        with open_capture(directory, self.describe(), inputs=self.request.inputs) as writer:
            self._run_into(writer, progress or NoProgress())
            for name, value in extra.items():
                writer.write_json(name, value)
            writer.finish()

    def run(self) -> dict[int, Mapping[Site, torch.Tensor]]:
        """Run the inputs once and return the sites to keep of every layer, on the CPU; write nothing."""
        layers: dict[int, Mapping[Site, torch.Tensor]] = {}

        def keep(layer: int, captured: Mapping[Site, torch.Tensor], _: torch.device) -> None:
            layers[layer] = kept_sites(run, layer, captured, inputs=inputs)

        run, inputs = self.request.run, self.request.inputs
        with recording_layers(
            self.model,
            tuple(run.span),
            sites=frozenset(run.sites),
            inputs=inputs,
            graph=self.request.model.spec.graph,
            sink=keep,
        ):
            self.forward(with_head=bool(run.model_sites))
        return layers

    def forward(self, hidden_states: torch.Tensor | None = None, *, with_head: bool = True) -> torch.Tensor:
        """Run the inputs once, on the embedding's device, and return the logits [B,S,vocab].

        A run that does not keep the logits computes those of the last position alone: [B,1,vocab].

        Args:
            hidden_states: The embedding's output, or that of a layer before the first that runs [B,S,H]; None to
                compute it from the tokens.
            with_head: Whether the lm_head runs. Without it, the base model's output [B,S,H] is returned.
        """
        inputs, device = self.request.inputs, input_device(self.model)
        given = {"input_ids": inputs.input_ids} if hidden_states is None else {"inputs_embeds": hidden_states}
        given |= {"attention_mask": inputs.attention_mask, "position_ids": inputs.position_ids}
        arguments: dict[str, Any] = {name: tensor.to(device) for name, tensor in given.items()}
        keeps_logits = ModelSite.LOGITS in self.request.run.model_sites
        output: torch.Tensor
        with torch.no_grad(), watched_memory():
            if with_head:
                num_kept = 0 if keeps_logits else 1
                output = self.model(**arguments, use_cache=False, logits_to_keep=num_kept).logits
            else:
                output = self.model.get_submodule("model")(**arguments, use_cache=False).last_hidden_state
        return output

    def make_writer(self, writer: CaptureWriter, progress: Progress) -> GoldenWriter:
        """Return the writer that measures floors and puts this golden's layers into a capture."""
        request, floor = self.request, None
        if request.noise_floor != "off":
            floor = NoiseFloor(
                config=self.model.config,
                weights=self.weights,
                spec=request.model.spec,
                inputs=request.inputs,
                variants=request.floor_variants,
            )
        return GoldenWriter(
            writer=writer,
            run=request.run,
            floor=floor,
            inputs=request.inputs,
            num_experts=request.model.spec.num_local_experts,
            keeps_twins=request.noise_floor == "full",
            reader=self.reader,
            progress=progress,
        )

    def _fingerprint(self) -> ModelFingerprint:
        part = self.request.part
        layers = self.request.run.span if part is None else part.stage.layers
        if isinstance(self.reader, OnceReader):
            # Both the fingerprint and the layers read these tensors.
            self.reader.expect_again(
                layer_prefix(layer) + name
                for layer in layers
                for name in fingerprinted_names(self.request.model.spec, layer)
            )
        return fingerprint_model(self.reader, self.request.model.spec, layers)

    def _run_into(self, writer: CaptureWriter, progress: Progress) -> None:
        run = self.request.run
        pending = tuple(layer for layer in run.span if layer not in writer.complete_layers)
        if not pending and (writer.has_model_sites or not run.model_sites):
            return
        first = pending[0] if pending else run.span.stop
        for layer in range(run.span.start, first):
            progress.skip(layer)
        # A resumed run skips all layers before the first pending one, and begins with the last one's stored output. If
        # no layer of the span is stored, nothing is skipped: layers before the span are never stored.
        is_resumed = first > run.span.start
        stored_output = writer.capture.read(first - 1, Site.OUTPUT) if is_resumed else None
        layers = range(first if is_resumed else 0, self.request.model.num_hidden_layers)
        with_head = bool(run.model_sites)
        golden_writer = self.make_writer(writer, progress)
        with (
            running_only(self.model, layers, with_head=with_head),
            recording_layers(
                self.model,
                pending,
                sites=golden_writer.wanted_sites,
                inputs=self.request.inputs,
                graph=self.request.model.spec.graph,
                sink=golden_writer.write_layer,
            ),
            recording_model(self.model, run.model_sites) as model_tensors,
        ):
            self.forward(stored_output, with_head=with_head)
        if with_head:
            golden_writer.write_model(
                {ModelSite.EMBEDDING: writer.capture.read(run.span.start, Site.INPUT), **model_tensors},
                hidden_states=writer.capture.read(run.span.last, Site.OUTPUT),
            )


@contextmanager
def open_golden(request: GoldenRequest) -> Iterator[Golden]:
    """Load and prove the golden model."""
    model, streaming = request.model, request.streaming
    # What headers show is checked before hundreds of gigabytes are loaded.
    refuse_ragged_blocks(model.spec)
    if streaming is None:
        with CheckpointReader(model.folder) as reader:
            _verify_layers(reader.index, request)
            request.budget.require(request.footprint.loading_bytes, "loading the model whole")
            loaded = load_golden_model(model, reader)
            proved = prove_model(loaded, spec=model.spec, reader=reader, dtype=model.dtype)
            weights = CheckpointTwinWeights(reader=reader, spec=model.spec, dtype=model.dtype)
            yield Golden(request, loaded, reader, weights, proved)
        return
    once_reader = OnceReader(model.folder, index=_streamed_index(request))
    with once_reader:
        _verify_layers(once_reader.index, request)
        with open_streamed_model(
            model, once_reader, streaming, footprint=request.footprint, budget=request.budget
        ) as streamed:
            proved = prove_bare_model(streamed.model, spec=model.spec, dtype=model.dtype)
            yield Golden(request, streamed.model, once_reader, streamed, proved)


def _streamed_index(request: GoldenRequest) -> TensorIndex:
    """Return the index of the tensors that are streamed: a slice's, the first layers' or, with None, all of them."""
    model = request.model
    if request.part is not None:
        return read_slice_index(model.folder, request.part, stored_names=model.spec.family.stored_names)
    is_cut = model.num_hidden_layers < model.spec.num_hidden_layers
    return TensorIndex.from_folder(model.folder, layers=range(model.num_hidden_layers) if is_cut else None)


def _verify_layers(index: TensorIndex, request: GoldenRequest) -> None:
    warn_of_rounded_router(index.entries, request.model.spec.graph)
    part = request.part
    for layer in range(request.model.num_hidden_layers) if part is None else part.stage.layers:
        verify_layer(index, request.model.spec, layer)
