"""The golden capture: transformers' model run once, written layer by layer with the noise floor beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpu_reference.golden.golden_writer import GoldenWriter, kept_sites
from gpu_reference.golden.noise_floor import NoiseFloor
from gpu_reference.golden.recording import recording_layers, recording_model
from gpu_reference.golden.resumption import skipping_layers
from gpu_reference.model.footprint import Footprint
from gpu_reference.model.model import GoldenModelRequest, load_golden_model
from gpu_reference.model.model_checks import certify, certify_streamed, refuse_ragged_blocks
from gpu_reference.model.placement import describe_devices, input_device, watched_memory
from gpu_reference.model.twin_weights import CheckpointTwinWeights, TwinWeights
from gpu_reference.streaming.once_reader import OnceReader
from gpu_reference.streaming.streaming import Streaming, open_streamed_model
from minimax_tools.capture.manifest import Description, dtype_name
from minimax_tools.capture.store import GOLDEN_SIDE
from minimax_tools.capture.writer import CaptureWriter, open_capture
from minimax_tools.checkpoint.fingerprint import FINGERPRINTED_NAMES, ModelFingerprint
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.layer_tensors import verify_layer
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.progress import NoProgress, Progress
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import Run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.weight_names import layer_prefix
from minimax_tools.provenance import Provenance
from minimax_tools.slices.stored_weights import read_slice_index

if TYPE_CHECKING:
    from transformers import MiniMaxM2ForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRequest:
    """A golden capture before it starts.

    Args:
        model: How to load the model.
        model_source: The model as the user named it.
        run: Layers and sites to keep.
        inputs: The token rows.
        noise_floor: `full` keeps the float32 twins, `stats` their distances, `off` neither.
        floor_variants: Names of what widens the floor (see `minimax_tools.reference.variants`).
        streaming: How to run a layer at a time; None to load the model whole.
        budget: What anonymous memory may be taken.
    """

    model: GoldenModelRequest
    model_source: str
    run: Run
    inputs: Inputs
    noise_floor: str
    floor_variants: tuple[str, ...] = ()
    streaming: Streaming | None = None
    budget: MemoryBudget = field(default_factory=MemoryBudget.unlimited)

    @property
    def footprint(self) -> Footprint:
        """The memory that it takes."""
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


class Golden:
    """A loaded golden model, proved and ready to run; made by `open_golden`.

    Attributes:
        request: What was asked for.
        model: transformers' model.
        reader: Its checkpoint, which counts what is read of it.
        weights: What it computes with.
    """

    def __init__(
        self,
        request: GoldenRequest,
        model: MiniMaxM2ForCausalLM,
        reader: CheckpointReader,
        weights: TwinWeights,
        proved: tuple[str, ...],
    ) -> None:
        self.request = request
        self.reader = reader
        self.weights = weights
        self._proved = proved
        self.model = model

    def describe(self) -> Description:
        """What a capture of this golden is."""
        request = self.request
        backend, devices = describe_devices(self.model)
        options: dict[str, Any] = {
            "attn_implementation": request.model.attn_implementation,
            "experts_implementation": request.model.experts_implementation,
            "float32_matmul": torch.backends.cuda.matmul.fp32_precision,
            "bfloat16_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            "proved": list(self._proved),
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
                    "router_gate": "float32",
                    "correction_bias": "float32",
                },
                target="transformers",
                options=options,
            ),
            inputs_digest=request.inputs.digest(),
            input_source=request.inputs.source,
            noise_floor=request.noise_floor,
            floor_variants=request.floor_variants,
        )

    def _fingerprint(self) -> ModelFingerprint:
        request = self.request
        part = None if request.streaming is None else request.streaming.part
        layers = request.run.span if part is None else part.stage.layers
        if isinstance(self.reader, OnceReader):
            # They are read again with their layers.
            self.reader.expect_again(
                layer_prefix(layer) + name for layer in layers for name in FINGERPRINTED_NAMES
            )
        return ModelFingerprint.of(self.reader, request.model.spec, layers)

    def capture(self, directory: Path, *, extra: Mapping[str, Any], progress: Progress | None = None) -> None:
        """Run the inputs once and write the capture; a killed capture resumes.

        Args:
            directory: The capture directory.
            extra: JSON values to store beside the tensors, by file name.
            progress: Told of every layer; None where nobody watches.

        Raises:
            CaptureError: The directory is in use, holds something else, or the disk is full.
            BackendError: A GPU ran out of memory.
        """
        with open_capture(directory, self.describe(), inputs=self.request.inputs) as writer:
            self._run_into(writer, progress or NoProgress())
            for name, value in extra.items():
                writer.write_json(name, value)
            writer.finish()

    def run(self) -> dict[int, Mapping[Site, torch.Tensor]]:
        """Run the inputs once and return every site of every layer of the span on the CPU.

        Raises:
            BackendError: A GPU ran out of memory.
        """
        layers: dict[int, Mapping[Site, torch.Tensor]] = {}

        def keep(layer: int, captured: Mapping[Site, torch.Tensor], _: torch.device) -> None:
            layers[layer] = kept_sites(self.request.run, layer, captured)

        run = self.request.run
        with recording_layers(
            self.model, tuple(run.span), sites=frozenset(run.sites), inputs=self.request.inputs, sink=keep
        ):
            self._run_layers()
        return layers

    def forward(self) -> torch.Tensor:
        """Run the inputs once, on the embedding's device, and return the logits [B,S,vocab].

        Of a run that does not keep them, the logits of the last position alone are computed.

        Raises:
            BackendError: A GPU ran out of memory.
        """
        with torch.no_grad(), watched_memory():
            output = self.model(
                **self.model_inputs(),
                use_cache=False,
                logits_to_keep=0 if ModelSite.LOGITS in self.request.run.model_sites else 1,
            )
        logits: torch.Tensor = output.logits
        return logits

    def _run_layers(self) -> None:
        """Run the inputs once, and the head only where its sites are wanted."""
        if self.request.run.model_sites:
            self.forward()
            return
        with torch.no_grad(), watched_memory():
            self.model.get_submodule("model")(**self.model_inputs(), use_cache=False)

    def model_inputs(self) -> dict[str, torch.Tensor]:
        """Token ids, mask and positions as transformers' model takes them, where it takes them."""
        inputs = self.request.inputs
        device = input_device(self.model)
        return {
            "input_ids": inputs.input_ids.to(device),
            "attention_mask": inputs.attention_mask.to(device),
            "position_ids": inputs.position_ids.to(device),
        }

    def _run_into(self, writer: CaptureWriter, progress: Progress) -> None:
        run, inputs = self.request.run, self.request.inputs
        pending = tuple(layer for layer in run.span if layer not in writer.complete_layers)
        if not pending and (writer.has_model_sites or not run.model_sites):
            return
        num_passed = pending[0] if pending else run.span.stop
        is_resumed = num_passed > run.span.start
        for layer in range(run.span.start, num_passed):
            progress.skip(layer)
        golden_writer = self.writing_to(writer, progress)
        with (
            skipping_layers(
                self.model,
                num_passed if is_resumed else 0,
                writer.read_layer_output(num_passed - 1) if is_resumed else None,
            ),
            recording_layers(
                self.model,
                pending,
                sites=golden_writer.wanted_sites,
                inputs=inputs,
                sink=golden_writer.write_layer,
            ),
            recording_model(self.model, run.model_sites) as model_tensors,
        ):
            self._run_layers()
        if run.model_sites:
            golden_writer.write_model(model_tensors, hidden_states=writer.read_layer_output(run.span.last))

    def writing_to(self, writer: CaptureWriter, progress: Progress) -> GoldenWriter:
        """What writes this golden's layers to a capture."""
        return GoldenWriter(
            writer,
            self.request.run,
            floor=self._noise_floor(),
            keeps_twins=self.request.noise_floor == "full",
            reader=self.reader,
            progress=progress,
        )

    def _noise_floor(self) -> NoiseFloor | None:
        if self.request.noise_floor == "off":
            return None
        return NoiseFloor(
            config=self.model.config,
            weights=self.weights,
            spec=self.request.model.spec,
            inputs=self.request.inputs,
            variants=self.request.floor_variants,
        )


@contextmanager
def open_golden(request: GoldenRequest) -> Iterator[Golden]:
    """Load and prove the golden model.

    Raises:
        GoldenRefusedError: The model fell into one of the known traps.
        CheckpointError: The checkpoint lacks tensors, or transformers could not load it.
        MissingExtraError: transformers or accelerate is missing, or too old to know MiniMax-M2.
        BackendError: A GPU's memory is too small.
        MemoryBudgetError: The budget would be broken.
    """
    model, streaming = request.model, request.streaming
    # What the headers tell is told before hundreds of gigabytes are loaded.
    refuse_ragged_blocks(model.spec)
    if streaming is None:
        with CheckpointReader(model.folder) as reader:
            _verify_layers(reader.index, request)
            yield _load_whole(request, reader)
        return
    once_reader = OnceReader(model.folder, index=_streamed_index(request, streaming))
    with once_reader:
        _verify_layers(once_reader.index, request)
        with open_streamed_model(
            model, once_reader, streaming, footprint=request.footprint, budget=request.budget
        ) as streamed:
            proved = certify_streamed(streamed.model, spec=model.spec, dtype=model.dtype)
            yield Golden(request, streamed.model, once_reader, streamed, proved)


def _load_whole(request: GoldenRequest, reader: CheckpointReader) -> Golden:
    model = request.model
    request.budget.require(request.footprint.loading_bytes, "loading the model whole")
    loaded = load_golden_model(model, reader)
    proved = certify(loaded, spec=model.spec, reader=reader, dtype=model.dtype)
    weights = CheckpointTwinWeights(reader=reader, spec=model.spec, dtype=model.dtype)
    return Golden(request, loaded, reader, weights, proved)


def _streamed_index(request: GoldenRequest, streaming: Streaming) -> TensorIndex:
    model = request.model
    if streaming.part is not None:
        return read_slice_index(model.folder, streaming.part)
    is_cut = model.num_hidden_layers < model.spec.num_hidden_layers
    return TensorIndex.from_folder(model.folder, layers=range(model.num_hidden_layers) if is_cut else None)


def _verify_layers(index: TensorIndex, request: GoldenRequest) -> None:
    part = None if request.streaming is None else request.streaming.part
    layers = range(request.model.num_hidden_layers) if part is None else part.stage.layers
    for layer in layers:
        verify_layer(index, request.model.spec, layer)
