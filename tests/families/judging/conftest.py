"""Ports of other families: transformers' own layers in BF16, right or with a mistake, run beside a toy's golden."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.capture.manifest import Description
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.recorder import shape_to_batch
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.capture.writer import open_capture
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import Mode, Run, multi_layer_run, sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expert_weight, module_weights
from minimax_tools.reference.modules import modeling_class, read_config, recording_layer
from minimax_tools.synthetic.toy_model import SyntheticModel

NUM_LAYERS = 2
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A mistake in transformers' layer: of its config, of the weights that it takes, or of its modules."""

    config: Mapping[str, Any] | None = None
    edit: Callable[[Tensors, ModelSpec], None] | None = None  # of the weights, by mm2's names
    patch: Callable[[torch.nn.Module, ModelSpec], None] | None = None  # of the built layer


RIGHT = Fault()


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A family's toy with its golden."""

    model: Path
    golden: Path
    folder: Path  # of runs

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_folder(self.model)

    def run(self, fault: Fault, *, in_layer: int | None = None, chained: bool = False) -> Path:
        """Run all layers, each on the golden's input or chained, wrong in all or in one; return the capture."""
        span = Span(0, NUM_LAYERS)
        run = (multi_layer_run if chained else sweep_run)(span, sites_level="all", graph=self.spec.graph)
        golden = Capture.open(self.golden)
        inputs = golden.read_inputs()
        folder = self.folder / f"run_{len(list(self.folder.iterdir()))}"
        states: torch.Tensor | None = None
        with (
            CheckpointReader(self.model) as reader,
            open_capture(folder, _describe(golden, run, inputs), inputs=inputs) as writer,
        ):
            for layer in span:
                tensors = LayerTensors.open(reader, self.spec, layer, torch.bfloat16)
                given = golden.read(layer, Site.INPUT) if states is None else states
                faulty = fault if in_layer in (None, layer) else RIGHT
                shown = _run_layer(self.model, self.spec, dict(tensors), faulty, given, inputs, layer)
                if states is not None:
                    del shown[Site.INPUT]
                states = shown[Site.OUTPUT] if run.mode is Mode.CHAINED else None
                writer.write(layer, shown)
            writer.finish()
        return folder


def _describe(golden: Capture, run: Run, inputs: Inputs) -> Description:
    provenance = replace(golden.description.provenance, target="test", dtypes={"weights": "bfloat16"})
    return Description(
        side=DEVICE_SIDE,
        run=run,
        provenance=provenance,
        inputs_digest=inputs.digest(),
        input_source=f"golden {golden.description.run.name}",
    )


def _run_layer(
    model: Path,
    spec: ModelSpec,
    tensors: Tensors,
    fault: Fault,
    states: torch.Tensor,
    inputs: Inputs,
    number: int,
) -> dict[Site, torch.Tensor]:
    from transformers.masking_utils import create_causal_mask

    config: Any = read_config(model, num_hidden_layers=NUM_LAYERS)
    # Another right way to compute than the golden's.
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    for key, value in (fault.config or {}).items():
        setattr(config, key, value)
    if fault.edit is not None:
        fault.edit(tensors, spec)
    layer = modeling_class(spec.family, "DecoderLayer")(config, number).to(torch.bfloat16).eval()
    layer.load_state_dict(_fused(tensors, spec, number))
    if fault.patch is not None:
        fault.patch(layer, spec)
    rotary = modeling_class(spec.family, "RotaryEmbedding")(config)
    graph = spec.graph.layer(number)
    recording = recording_layer(layer, sites=graph.sites, graph=graph, attn_implementation="eager")
    with torch.no_grad(), recording as shown:
        layer(
            states,
            attention_mask=create_causal_mask(
                config, states, inputs.attention_mask, None, position_ids=inputs.position_ids
            ),
            position_ids=inputs.position_ids,
            position_embeddings=rotary(states, position_ids=inputs.position_ids),
        )
    return {site: shape_to_batch(site, shown[site], inputs.batch_shape) for site in graph.sites}


def _fused(tensors: Tensors, spec: ModelSpec, layer: int) -> Tensors:
    """Return a layer's weights as transformers holds them."""
    experts = range(spec.num_local_experts)
    gate, down, up = (
        torch.stack([tensors[expert_weight(expert, matrix)] for expert in experts])
        for matrix in ("w1", "w2", "w3")
    )
    others = {
        place: torch.cat([tensors[name] for name in names])
        for place, names in module_weights(spec, layer).items()
    }
    return {**others, "mlp.experts.gate_up_proj": torch.cat((gate, up), dim=1), "mlp.experts.down_proj": down}


@pytest.fixture(scope="session", params=["qwen3_moe", "olmoe", "mixtral"])
def family_toy(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    make_model: Callable[..., Path],
    make_golden: Callable[..., Path],
) -> Toy:
    """A toy of two layers of a family, and its golden."""
    pytest.importorskip("transformers", reason="transformers is not installed: goldens are made with it")
    toy = SyntheticModel.toy(FAMILIES[request.param]).resized(num_hidden_layers=NUM_LAYERS)
    model = make_model(toy, torch.bfloat16)
    golden = make_golden(model, "--seq-len", "48,33")
    return Toy(model=model, golden=golden, folder=tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def right() -> Fault:
    """No mistake."""
    return RIGHT


@pytest.fixture(scope="session")
def fault() -> type[Fault]:
    """A mistake that is planted."""
    return Fault
