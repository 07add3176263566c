"""The golden capture: hooks over transformers' model, the noise floor beside it, written layer by layer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpu_reference.certify import certify
from gpu_reference.model import GoldenModelRequest, load_golden_model
from minimax_tools.capture.manifest import Description, dtype_name
from minimax_tools.capture.recorder import Recorder, copy_to_host, shape_to_batch
from minimax_tools.capture.store import GOLDEN_SIDE
from minimax_tools.capture.taps import Tap
from minimax_tools.capture.writer import CaptureWriter, open_capture
from minimax_tools.checkpoint.fingerprint import ModelFingerprint
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.names import CORRECTION_BIAS
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.floor import floor_statistics
from minimax_tools.inputs import Inputs
from minimax_tools.provenance import Provenance
from minimax_tools.reference.head import Float32Head
from minimax_tools.reference.modules import LAYER_TAPS, RECORD_ROPE
from minimax_tools.reference.twin import Float32Twin
from minimax_tools.run import Run
from minimax_tools.sites import ModelSite, Site

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_MODEL_TAPS: Mapping[ModelSite, str] = {
    ModelSite.EMBEDDING: "model.embed_tokens",
    ModelSite.FINAL_NORM: "model.norm",
    ModelSite.LOGITS: "lm_head",
}
# What the twin and the floor statistics need of the reference, captured or not.
_FLOOR_SITES = (Site.INPUT, Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRequest:
    """A golden capture before it starts.

    Args:
        model: How to load the model.
        model_source: The model as the user named it.
        run: Layers and sites to keep.
        inputs: The token rows.
        noise_floor: `full` keeps the float32 twins, `stats` their distances, `off` neither.
    """

    model: GoldenModelRequest
    model_source: str
    run: Run
    inputs: Inputs
    noise_floor: str


class Golden:
    """A loaded golden model, proved and ready to run; made by `open_golden`."""

    def __init__(
        self, request: GoldenRequest, model: PreTrainedModel, reader: CheckpointReader, proved: tuple[str, ...]
    ) -> None:
        self._request = request
        self._reader = reader
        self._proved = proved
        self.model = model

    def describe(self) -> Description:
        """What a capture of this golden is."""
        request = self._request
        dtype = dtype_name(request.model.dtype)
        fingerprint = ModelFingerprint.of(self._reader, request.model.spec, request.run.span)
        device = self.model.get_submodule("model.embed_tokens").weight.device
        options: dict[str, Any] = {
            "attn_implementation": request.model.attn_implementation,
            "experts_implementation": request.model.experts_implementation,
            "float32_matmul": torch.backends.cuda.matmul.fp32_precision,
            "proved": list(self._proved),
        }
        return Description(
            side=GOLDEN_SIDE,
            run=request.run,
            provenance=Provenance(
                model=fingerprint,
                model_source=request.model_source,
                backend=device.type,
                device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                dtypes={"weights": dtype, "router_gate": "float32", "correction_bias": "float32"},
                target="transformers",
                options=options,
            ),
            inputs_digest=request.inputs.digest(),
            input_source=request.inputs.source,
            noise_floor=request.noise_floor,
        )

    def capture(self, directory: Path, *, extra: Mapping[str, Any]) -> None:
        """Run the inputs once and write the capture; a killed capture resumes.

        Args:
            directory: The capture directory.
            extra: JSON values to store beside the tensors, by file name.

        Raises:
            CaptureError: The directory is in use, holds something else, or the disk is full.
        """
        with open_capture(directory, self.describe(), inputs=self._request.inputs) as writer:
            self._run_into(writer)
            for name, value in extra.items():
                writer.write_json(name, value)
            writer.finish()

    def run(self) -> dict[int, dict[Site, torch.Tensor]]:
        """Run the inputs once and return every site of every layer of the span on the CPU."""
        captured: dict[int, dict[Site, torch.Tensor]] = {}
        with contextlib.ExitStack() as stack:
            for layer in self._request.run.span:
                captured[layer] = stack.enter_context(self._recording(layer))
            self.forward()
        return {layer: self._kept(layer, self._shaped(tensors)) for layer, tensors in captured.items()}

    def forward(self) -> None:
        """One forward pass over the inputs, on the embedding's device."""
        inputs = self._request.inputs
        device = self.model.get_submodule("model.embed_tokens").weight.device
        device = torch.device("cpu") if device.type == "meta" else device
        with torch.no_grad():
            self.model(
                input_ids=inputs.input_ids.to(device),
                attention_mask=inputs.attention_mask.to(device),
                position_ids=inputs.position_ids.to(device),
                use_cache=False,
            )

    def _run_into(self, writer: CaptureWriter) -> None:
        pending = [layer for layer in self._request.run.span if layer not in writer.complete_layers]
        model_tensors: dict[ModelSite, torch.Tensor] = {}
        with contextlib.ExitStack() as stack:
            for layer in pending:
                tensors = stack.enter_context(self._recording(layer))
                stack.enter_context(self._when_done(layer, tensors, writer))
            stack.enter_context(self._recording_model(model_tensors))
            self.forward()
        if self._request.run.model_sites:
            writer.write_model(model_tensors, twin=self._model_twin(writer))

    def _decoder_layer(self, layer: int) -> torch.nn.Module:
        return self.model.get_submodule(f"model.layers.{layer}")

    @contextlib.contextmanager
    def _recording(self, layer: int) -> Iterator[dict[Site, torch.Tensor]]:
        """Hooks on one layer; the tensors appear in the mapping as the layer runs."""
        module, wanted = self._decoder_layer(layer), {*self._request.run.sites, *_FLOOR_SITES}
        taps = {site: tap for site, tap in LAYER_TAPS.items() if site in wanted}
        recorder = Recorder(module, taps, keep=copy_to_host)

        def record_rope(query: torch.Tensor, key: torch.Tensor) -> None:
            for site, tensor in ((Site.Q_ROPE, query), (Site.K_ROPE, key)):
                if site in wanted:
                    recorder.record(site, tensor)

        attention = module.get_submodule("self_attn")
        setattr(attention, RECORD_ROPE, record_rope)
        try:
            with recorder:
                yield recorder.tensors
        finally:
            delattr(attention, RECORD_ROPE)

    @contextlib.contextmanager
    def _when_done(self, layer: int, tensors: dict[Site, torch.Tensor], writer: CaptureWriter) -> Iterator[None]:
        """Write the layer, its floor beside it, as soon as it has run."""

        def write(*_: object) -> None:
            captured = self._shaped(tensors)
            twin = self._twin(layer, captured)
            writer.write_layer(
                layer,
                self._kept(layer, captured),
                twin=twin if self._request.noise_floor == "full" else None,
                floor=self._floor(layer, captured, twin) if twin else None,
            )
            tensors.clear()
            logger.info("Layer %d of %s captured.", layer, self._request.run.span)

        handle = self._decoder_layer(layer).register_forward_hook(write)
        try:
            yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def _recording_model(self, tensors: dict[ModelSite, torch.Tensor]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for site in self._request.run.model_sites:
                recorder = Recorder(
                    self.model.get_submodule(_MODEL_TAPS[site]), {Site.OUTPUT: Tap(path="")}, keep=copy_to_host
                )
                stack.enter_context(recorder)
                stack.callback(lambda site=site, recorder=recorder: tensors.update({site: recorder.tensors[Site.OUTPUT]}))
            yield

    def _shaped(self, tensors: Mapping[Site, torch.Tensor]) -> dict[Site, torch.Tensor]:
        return {site: shape_to_batch(site, tensor, self._request.inputs) for site, tensor in tensors.items()}

    def _kept(self, layer: int, captured: Mapping[Site, torch.Tensor]) -> dict[Site, torch.Tensor]:
        """The sites to store: a layer's input only where it is not the output of the layer before."""
        run = self._request.run
        repeats = layer > run.span.start and Site.OUTPUT in run.sites
        return {
            site: captured[site]
            for site in run.sites
            if site in captured and not (site is Site.INPUT and repeats)
        }

    def _tensors(self, layer: int) -> LayerTensors:
        return LayerTensors.open(self._reader, self._request.model.spec, layer, self._request.model.dtype)

    def _twin(self, layer: int, captured: Mapping[Site, torch.Tensor]) -> dict[Site, torch.Tensor]:
        """The float32 twin of one layer's sites; empty where no floor is kept."""
        if self._request.noise_floor == "off":
            return {}
        norm = self._decoder_layer(layer).get_submodule("input_layernorm").weight
        twin = Float32Twin(
            self.model.config,
            self._tensors(layer),
            layer=layer,
            device=torch.device("cpu") if norm.is_meta else norm.device,
        )
        sites = tuple(
            site for site in Site if site in (*self._request.run.computed_sites, Site.ROUTER_LOGITS)
        )
        return twin.run(
            captured[Site.INPUT], self._request.inputs, router_experts=captured[Site.ROUTER_EXPERTS], sites=sites
        )

    def _floor(
        self, layer: int, captured: Mapping[Site, torch.Tensor], twin: Mapping[Site, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        spec = self._request.model.spec
        return floor_statistics(
            captured,
            twin,
            attention_mask=self._request.inputs.attention_mask,
            correction_bias=self._tensors(layer)[CORRECTION_BIAS],
            num_experts_per_tok=spec.num_experts_per_tok,
        )

    def _model_twin(self, writer: CaptureWriter) -> dict[ModelSite, torch.Tensor] | None:
        if self._request.noise_floor == "off":
            return None
        head = Float32Head(self._reader, self._request.model.spec, dtype=self._request.model.dtype)
        return head.run(writer.read_layer_output(self._request.run.span.last))


@contextlib.contextmanager
def open_golden(request: GoldenRequest) -> Iterator[Golden]:
    """Load and prove the golden model.

    Raises:
        GoldenRefusedError: The model fell into one of the known traps.
    """
    with CheckpointReader(request.model.folder) as reader:
        model = load_golden_model(request.model)
        proved = certify(model, spec=request.model.spec, reader=reader)
        yield Golden(request, model, reader, proved)
