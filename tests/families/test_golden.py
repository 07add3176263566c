"""Goldens of each family, and mm2's own layer in float32 beside transformers'."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu_reference.certification.golden_checks import relative_distance
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.recorder import shape_to_batch
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.graph import QkNorm
from minimax_tools.model.router import router_dtypes
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.evaluation import Float32Layer
from minimax_tools.reference.modules import loading_arguments, modeling_class, recording_layer

LAYER = 2


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


def test_streamed_golden_has_the_bytes_of_the_loaded_one(
    make: Callable[..., Capture], made: Path, capture: Capture
) -> None:
    streamed = make(made, "--stream", "on")
    assert contents(streamed.directory) == contents(capture.directory)


def test_golden_holds_every_site_of_every_layer(capture: Capture, spec: ModelSpec) -> None:
    shape = (*capture.read_inputs().batch_shape,)
    for layer in range(spec.num_hidden_layers):
        widths = {
            Site.Q_NORM: spec.query_width,
            Site.K_NORM: spec.key_value_width,
            Site.ROUTER_LOGITS: spec.num_local_experts,
        }
        for site in spec.graph.layer(layer).sites:
            values = capture.read(layer, site)
            if site in widths:
                assert values.shape == (*shape, widths[site])
    dtypes = capture.description.provenance.dtypes
    assert router_dtypes(spec.graph, "bfloat16").items() <= dtypes.items()
    assert ("correction_bias" in dtypes) == spec.graph.has_correction_bias


def test_golden_is_certified(
    command: Any, made: Path, spec: ModelSpec, capture: Capture, tmp_path: Path
) -> None:
    golden = shutil.copytree(capture.directory, tmp_path / "golden")
    done = command(mm2_gpu, "certify", "--model", made, "--golden", golden, "--json", "--quiet")
    assert done.exit_code == 0, done.output
    checks = {check["name"]: check["outcome"] for check in json.loads(done.stdout)["certificate"]["checks"]}
    of_other_graphs = set() if spec.graph.qk_norm is QkNorm.ALL_HEADS else {"qk_norm_width"}
    assert {name for name, outcome in checks.items() if outcome != "passed"} == of_other_graphs


def test_float32_layer_is_transformers_in_float32(made: Path, spec: ModelSpec, capture: Capture) -> None:
    inputs, states = capture.read_inputs(), capture.read(LAYER, Site.INPUT)
    exact = run_in_float32(spec, made, states, inputs)
    with CheckpointReader(made) as reader:
        tensors = LayerTensors.open(reader, spec, LAYER, torch.float32)
        computed = Float32Layer(spec, tensors).run(states, inputs, router_experts=exact[Site.ROUTER_EXPERTS])
    real = inputs.attention_mask.bool()
    compared = [site for site in computed if computed[site].is_floating_point()]
    assert set(spec.graph.layer(LAYER).sites) - {Site.INPUT, Site.ROUTER_EXPERTS} <= set(compared)
    for site in compared:
        assert relative_distance(site, computed[site], exact[site], real) <= 1e-5, site


def run_in_float32(
    spec: ModelSpec, folder: Path, states: torch.Tensor, inputs: Any
) -> dict[Site, torch.Tensor]:
    """Run a layer of transformers' model whose every weight is the stored one, upcast."""
    from transformers.masking_utils import create_causal_mask

    kind = modeling_class(spec.family, "ForCausalLM")
    model = kind.from_pretrained(folder, dtype=torch.float32, **loading_arguments(spec.family)).eval()
    exact, positions = states.float(), {"position_ids": inputs.position_ids}
    mask = create_causal_mask(model.config, exact, inputs.attention_mask, None, **positions)
    rotation = model.model.rotary_emb(exact, **positions)
    module = model.model.layers[LAYER]
    recording = recording_layer(
        module, sites=tuple(Site), graph=spec.graph.layer(LAYER), attn_implementation="sdpa"
    )
    with torch.no_grad(), recording as tensors:
        module(exact, attention_mask=mask, position_embeddings=rotation, **positions)
    return {site: shape_to_batch(site, tensor, inputs.batch_shape) for site, tensor in tensors.items()}
