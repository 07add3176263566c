"""Effects: change by a plant in float32 at each site, over the noise floor of the golden there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial

import torch

from compare.sides.batch import Batch
from faults.plant import Plant
from faults.port import PlantedLayer
from faults.scene import Scene
from minimax_tools.capture.recorder import Recorder, copy_to_host, shape_to_batch
from minimax_tools.capture.taps import Tap
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.run import sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from neuron.ports.target import target_config
from neuron.runs.decoding import run_decoding
from neuron.runs.golden_inputs import GoldenInputs
from neuron.runs.layer_run import LayerInput, LayerRun

Tensors = Mapping[Site, torch.Tensor]
_SITES = tuple(site for site in Site if site is not Site.INPUT)


def run_float32(
    scene: Scene, layer: int, plant: Plant | None, *, decode_rows: int = 0
) -> dict[Site, torch.Tensor]:
    """Run one layer of the port in float32, on the golden's input and the values of the BF16 weights.

    Where the last `decode_rows` rows are decoded, the mistake is limited to them.
    """
    config = target_config(scene.spec)
    module = PlantedLayer(config, plant, decode_only=decode_rows > 0)
    tensors = LayerTensors.open(scene.reader, scene.spec, layer, torch.bfloat16)
    state = {
        name: tensor.float() for name, tensor in module.convert_state_dict(tensors, config, layer).items()
    }
    module.load_state_dict(state)
    whole = LayerInput.of(scene.golden.read(layer, Site.INPUT).float(), scene.inputs)
    run = partial(_run_once, module)
    if not decode_rows:
        return dict(run(whole).tensors)
    decoding = sweep_run(Span.single(layer), sites_level="all").decoding(decode_rows)
    past = GoldenInputs(golden=scene.golden, run=decoding).past(layer)
    assert past is not None, "a run that decodes begins with a past"
    # Prompts are padded on the right: decoding starts at the last rows of the shortest one.
    lengths = scene.inputs.lengths
    rows = range(max(min(lengths) - decode_rows, 1), max(lengths))
    given = (past[0].float(), past[1].float())
    return dict(run_decoding(run, whole, rows=rows, sites=_SITES, past=given).tensors)


def measure_effects(scene: Scene, layer: int, plant: Plant, *, decode_rows: int = 0) -> dict[Site, float]:
    """Compute ‖planted − right‖ / ‖golden − float32 twin‖ on the real rows, by site.

    The effect on router_experts is a ratio of flipped tokens. A changed shape has an infinite effect.
    """
    planted = _in_order_of_experts(run_float32(scene, layer, plant, decode_rows=decode_rows))
    right = _in_order_of_experts(_right_float32(scene, layer, decode_rows))
    batch = Batch.of(scene.golden, scene.golden)
    return {site: _effect(scene, batch, layer, site, planted[site], right[site]) for site in _SITES}


def _effect(
    scene: Scene, batch: Batch, layer: int, site: Site, planted: torch.Tensor, right: torch.Tensor
) -> float:
    if planted.shape != right.shape:
        return math.inf
    reference, twin = scene.golden.read(layer, site), scene.golden.read_twin(layer, site)
    assert twin is not None, "the golden keeps its whole floor"
    rows = [batch.rows(tensor, site).double() for tensor in (planted, right, reference, twin)]
    if site is Site.ROUTER_EXPERTS:
        sets = [row.sort(dim=-1).values for row in rows]
        flips = int((sets[0] != sets[1]).any(-1).sum())
        return flips / max(int((sets[2] != sets[3]).any(-1).sum()), 1)
    change, noise = float((rows[0] - rows[1]).norm()), float((rows[2] - rows[3]).norm())
    if reference.dtype is torch.float32 and torch.equal(rows[0], rows[0].bfloat16().double()):
        # A right port may round to BF16 a value that the golden holds in float32.
        noise = math.hypot(noise, float((rows[1] - rows[1].bfloat16().double()).norm()))
    if not math.isfinite(change):
        return math.inf
    return change / noise if noise else (math.inf if change else 0.0)


def _in_order_of_experts(tensors: Tensors) -> Tensors:
    """Sort the routing weights by expert: the order of the experts is free."""
    order = tensors[Site.ROUTER_EXPERTS].argsort(dim=-1)
    return {**tensors, Site.ROUTER_WEIGHTS: tensors[Site.ROUTER_WEIGHTS].gather(-1, order)}


@lru_cache(maxsize=16)
def _right_float32(scene: Scene, layer: int, decode_rows: int) -> Tensors:
    return run_float32(scene, layer, None, decode_rows=decode_rows)


def _run_once(module: PlantedLayer, given: LayerInput) -> LayerRun:
    taps = {Site(site): Tap(path=path) for site, path in module.sites.items()}
    # Sites that a plant hides are recorded too.
    taps |= {site: Tap(path=f"taps.{site}") for site in _SITES if site is not Site.OUTPUT}
    recorder = Recorder(module, taps, keep=copy_to_host)
    with torch.no_grad(), recorder:
        output, (keys, values) = module(
            given.hidden_states, given.attention_mask, given.position_ids, given.past
        )
    shape = (given.batch_size, given.num_rows)
    tensors = {site: shape_to_batch(site, tensor, shape) for site, tensor in recorder.tensors.items()}
    count = given.num_rows
    return LayerRun(
        output=output,
        tensors={**tensors, Site.OUTPUT: output},
        not_exposed=(),
        router_dtypes={},
        key_values=(keys[:, :, -count:], values[:, :, -count:]),
    )
