"""The golden capture: transformers' model run once, written layer by layer with the noise floor beside it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpu_reference.certify import certify, certify_streamed, refuse_ragged_blocks
from gpu_reference.footprint import Footprint
from gpu_reference.model import GoldenModelRequest, load_golden_model
from gpu_reference.noise_floor import FLOOR_SITES, NoiseFloor
from gpu_reference.placement import describe_devices, watched_memory
from gpu_reference.recording import recording_layers, recording_model
from gpu_reference.resumption import skipping_layers
from gpu_reference.streaming import Streaming, open_streamed_model
from gpu_reference.weights import CheckpointWeights, GoldenWeights
from minimax_tools.capture.manifest import Description, dtype_name
from minimax_tools.capture.store import GOLDEN_SIDE
from minimax_tools.capture.writer import CaptureWriter, open_capture
from minimax_tools.checkpoint.fingerprint import ModelFingerprint
from minimax_tools.checkpoint.layer_tensors import verify_layer
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.inputs import Inputs
from minimax_tools.memory import MemoryBudget
from minimax_tools.progress import NoProgress, Progress
from minimax_tools.provenance import Provenance
from minimax_tools.run import Run
from minimax_tools.sites import ModelSite, Site

if TYPE_CHECKING:
    from transformers import MiniMaxM2ForCausalLM

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRequest:
    """A golden capture before it starts.

    Args:
        model: How to load the model.
        model_source: The model as the user named it.
        run: Layers and sites to keep.
        inputs: The token rows.
        noise_floor: `full` keeps the float32 twins, `stats` their distances, `off` neither.
        streaming: How to run a layer at a time; None to load the model whole.
        budget: What anonymous memory may be taken.
    """

    model: GoldenModelRequest
    model_source: str
    run: Run
    inputs: Inputs
    noise_floor: str
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
        )


class Golden:
    """A loaded golden model, proved and ready to run; made by `open_golden`.

    Attributes:
        model: transformers' model.
        reader: Its checkpoint, which counts what is read of it.
    """

    def __init__(
        self,
        request: GoldenRequest,
        model: MiniMaxM2ForCausalLM,
        reader: CheckpointReader,
        weights: GoldenWeights,
        proved: tuple[str, ...],
    ) -> None:
        self._request = request
        self.reader = reader
        self._weights = weights
        self._proved = proved
        self.model = model

    def describe(self) -> Description:
        """What a capture of this golden is."""
        request = self._request
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
                model=ModelFingerprint.of(self.reader, request.model.spec, request.run.span),
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
        )

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
        with open_capture(directory, self.describe(), inputs=self._request.inputs) as writer:
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
            layers[layer] = self._kept(layer, captured)

        run = self._request.run
        with recording_layers(
            self.model, tuple(run.span), sites=frozenset(run.sites), inputs=self._request.inputs, sink=keep
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
                **self._model_inputs(),
                use_cache=False,
                logits_to_keep=0 if ModelSite.LOGITS in self._request.run.model_sites else 1,
            )
        logits: torch.Tensor = output.logits
        return logits

    def _run_layers(self) -> None:
        """Run the inputs once, and the head only where its sites are wanted."""
        if self._request.run.model_sites:
            self.forward()
            return
        with torch.no_grad(), watched_memory():
            self.model.get_submodule("model")(**self._model_inputs(), use_cache=False)

    def _model_inputs(self) -> dict[str, torch.Tensor]:
        inputs = self._request.inputs
        device = self.model.get_submodule("model.embed_tokens").get_parameter("weight").device
        streaming = self._request.streaming
        if streaming is not None:
            device = streaming.device
        elif device.type == "meta":
            # An offloaded embedding has no device of its own; accelerate moves the inputs to where it runs.
            device = torch.device("cpu")
        return {
            "input_ids": inputs.input_ids.to(device),
            "attention_mask": inputs.attention_mask.to(device),
            "position_ids": inputs.position_ids.to(device),
        }

    def _run_into(self, writer: CaptureWriter, progress: Progress) -> None:
        run, inputs = self._request.run, self._request.inputs
        pending = tuple(layer for layer in run.span if layer not in writer.complete_layers)
        if not pending and (writer.has_model_sites or not run.model_sites):
            return
        num_passed = pending[0] if pending else run.span.stop
        is_resumed = num_passed > run.span.start
        for layer in range(run.span.start, num_passed):
            progress.skip(layer)
        floor = self._noise_floor()
        num_bytes_read = self.reader.num_bytes_read

        def write(layer: int, captured: Mapping[Site, torch.Tensor], device: torch.device) -> None:
            nonlocal num_bytes_read
            twin = floor.run_layer(layer, captured, sites=run.computed_sites, device=device) if floor else {}
            writer.write_layer(
                layer,
                self._kept(layer, captured),
                twin=twin if self._keeps_twins else None,
                floor=floor.measure_layer(layer, captured, twin) if floor else None,
            )
            progress.advance(layer, num_bytes=self.reader.num_bytes_read - num_bytes_read)
            num_bytes_read = self.reader.num_bytes_read

        wanted = frozenset(run.sites) | (FLOOR_SITES if floor else frozenset())
        with (
            skipping_layers(
                self.model,
                num_passed if is_resumed else 0,
                writer.read_layer_output(num_passed - 1) if is_resumed else None,
            ),
            recording_layers(self.model, pending, sites=wanted, inputs=inputs, sink=write),
            recording_model(self.model, run.model_sites) as model_tensors,
        ):
            self._run_layers()
        if run.model_sites:
            self._write_model(writer, model_tensors, floor)

    def _write_model(
        self, writer: CaptureWriter, captured: Mapping[ModelSite, torch.Tensor], floor: NoiseFloor | None
    ) -> None:
        twin = floor.run_head(writer.read_layer_output(self._request.run.span.last)) if floor else {}
        writer.write_model(
            captured,
            twin=twin if self._keeps_twins else None,
            floor=floor.measure_head(captured, twin) if floor else None,
        )

    @property
    def _keeps_twins(self) -> bool:
        return self._request.noise_floor == "full"

    def _noise_floor(self) -> NoiseFloor | None:
        if self._request.noise_floor == "off":
            return None
        return NoiseFloor(
            config=self.model.config,
            weights=self._weights,
            spec=self._request.model.spec,
            inputs=self._request.inputs,
        )

    def _kept(self, layer: int, captured: Mapping[Site, torch.Tensor]) -> dict[Site, torch.Tensor]:
        """The sites to store: a layer's input only where it is not the output of the layer before."""
        run = self._request.run
        repeats = layer > run.span.start and Site.OUTPUT in run.sites
        return {site: captured[site] for site in run.sites if not (site is Site.INPUT and repeats)}


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
    model = request.model
    is_part = request.streaming is not None and model.num_hidden_layers < model.spec.num_hidden_layers
    layers = range(model.num_hidden_layers) if is_part else None
    with CheckpointReader(model.folder, layers=layers) as reader:
        # What the headers tell is told before hundreds of gigabytes are loaded.
        refuse_ragged_blocks(model.spec)
        for layer in range(model.num_hidden_layers):
            verify_layer(reader.index, model.spec, layer)
        if request.streaming is not None:
            with open_streamed_model(
                model, reader, request.streaming, footprint=request.footprint, budget=request.budget
            ) as streamed:
                proved = certify_streamed(streamed.model, spec=model.spec, dtype=model.dtype)
                yield Golden(request, streamed.model, reader, streamed, proved)
            return
        request.budget.require(request.footprint.loading_bytes, "loading the model whole")
        loaded = load_golden_model(model, reader)
        proved = certify(loaded, spec=model.spec, reader=reader, dtype=model.dtype)
        weights = CheckpointWeights(reader=reader, spec=model.spec, dtype=model.dtype)
        yield Golden(request, loaded, reader, weights, proved)
