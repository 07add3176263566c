"""Effects: the change that a plant makes in float32 at each site, over the golden's noise floor there.

An effect of 1 is as large as the error that BF16 alone costs the golden. A row is here a token of every prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial

import torch

from compare.sides.sides import Batch
from faults.baseline import Baseline
from faults.plant import Plant
from faults.port import PlantedLayer
from minimax_tools.capture.recorder import Recorder, copy_to_host, shape_to_batch
from minimax_tools.capture.taps import Tap
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.run import sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from neuron.ports.target import target_config
from neuron.runs.device_request import GoldenInputs
from neuron.runs.generation import run_decoding
from neuron.runs.layer_run import LayerInput, LayerRun

SiteTensors = Mapping[Site, torch.Tensor]


def run_float32(
    baseline: Baseline, layer: int, plant: Plant | None, *, num_decoded: int = 0
) -> dict[Site, torch.Tensor]:
    """Run one layer of the port in float32, on the golden's input and the values of the BF16 weights.

    The last `num_decoded` tokens are decoded, from the golden's keys and values. Then the mistake is limited to them.
    """
    config = target_config(baseline.spec)
    module = PlantedLayer(config, layer, plant, decode_only=num_decoded > 0)
    tensors = LayerTensors.open(baseline.reader, baseline.spec, layer, torch.bfloat16)
    state = {
        name: tensor.float() for name, tensor in module.convert_state_dict(tensors, config, layer).items()
    }
    module.load_state_dict(state)
    all_rows = LayerInput.of(baseline.golden.read(layer, Site.INPUT).float(), baseline.inputs)
    run = partial(_run_once, module)
    if not num_decoded:
        return dict(run(all_rows).tensors)
    decoding = sweep_run(Span.single(layer), sites_level="all", graph=baseline.spec.graph).decoding(
        num_decoded
    )
    past = GoldenInputs(golden=baseline.golden, run=decoding).past(layer)
    assert past is not None, "a run that decodes begins with a past"
    # Prompts are padded on the right: decoding starts at the last tokens of the shortest one, for all of them.
    lengths = baseline.inputs.lengths
    columns = range(max(min(lengths) - num_decoded, 1), max(lengths))  # the first token is never decoded
    past_float32 = (past[0].float(), past[1].float())
    sites = _sites(baseline, layer)
    return dict(run_decoding(run, all_rows, columns=columns, sites=sites, past=past_float32).tensors)


def _sites(baseline: Baseline, layer: int) -> tuple[Site, ...]:
    """Return the sites of a layer but its input."""
    return tuple(site for site in baseline.spec.graph.layer(layer).sites if site is not Site.INPUT)


def measure_effects(
    baseline: Baseline, layer: int, plant: Plant, *, num_decoded: int = 0
) -> dict[Site, float]:
    """Compute ‖planted − right‖ / ‖golden − float32 twin‖ on the real tokens, by site.

    At router_experts it is the number of tokens that the plant flips, over the number that BF16 flips. A changed shape
    has an infinite effect.
    """
    planted = _with_sorted_experts(run_float32(baseline, layer, plant, num_decoded=num_decoded))
    right = _with_sorted_experts(_right_float32(baseline, layer, num_decoded))
    batch = Batch.of(baseline.golden, baseline.golden)
    return {
        site: _effect(baseline, batch, layer, site, planted[site], right[site])
        for site in _sites(baseline, layer)
    }


def _effect(
    baseline: Baseline, batch: Batch, layer: int, site: Site, planted: torch.Tensor, right: torch.Tensor
) -> float:
    """Return the effect at one site; see `measure_effects`."""
    if planted.shape != right.shape:
        return math.inf
    reference, twin = baseline.golden.read(layer, site), baseline.golden.read_twin(layer, site)
    assert twin is not None, "the golden keeps its whole floor"
    wrong, exact, golden, float32 = (
        batch.rows(tensor, site).double() for tensor in (planted, right, reference, twin)
    )
    if site is Site.ROUTER_EXPERTS:
        # At least one flip, so that a golden without any gives a number.
        return _count_flips(wrong, exact) / max(_count_flips(golden, float32), 1)
    change, noise = float((wrong - exact).norm()), float((golden - float32).norm())
    if reference.dtype is torch.float32 and torch.equal(wrong, wrong.bfloat16().double()):
        # A right port may round to BF16 a value that the golden holds in float32.
        noise = math.hypot(noise, float((exact - exact.bfloat16().double()).norm()))
    if not math.isfinite(change):
        return math.inf
    if noise == 0.0:
        return math.inf if change else 0.0
    return change / noise


def _count_flips(experts: torch.Tensor, others: torch.Tensor) -> int:
    """Count the tokens of [T,k] whose sets of experts differ."""
    return int((experts.sort(dim=-1).values != others.sort(dim=-1).values).any(-1).sum())


def _with_sorted_experts(tensors: SiteTensors) -> SiteTensors:
    """Sort the routing weights by expert number: a port may list a token's experts in any order."""
    if Site.ROUTER_EXPERTS not in tensors:
        return tensors
    order = tensors[Site.ROUTER_EXPERTS].argsort(dim=-1)
    return {**tensors, Site.ROUTER_WEIGHTS: tensors[Site.ROUTER_WEIGHTS].gather(-1, order)}


@lru_cache(maxsize=16)
def _right_float32(baseline: Baseline, layer: int, num_decoded: int) -> SiteTensors:
    """Run the right layer; the result serves all plants of a baseline's few layers."""
    return run_float32(baseline, layer, None, num_decoded=num_decoded)


def _run_once(module: PlantedLayer, layer_input: LayerInput) -> LayerRun:
    """Run the layer on one input, and record all its sites."""
    taps = {Site(site): Tap(path=path) for site, path in module.sites.items()}
    # Sites that a plant hides are recorded too.
    taps |= {Site(site): Tap(path=f"taps.{site}") for site in module.taps}
    recorder = Recorder(module, taps, keep=copy_to_host)
    with torch.no_grad(), recorder:
        output, (keys, values) = module(
            layer_input.hidden_states, layer_input.attention_mask, layer_input.position_ids, layer_input.past
        )
    count = layer_input.num_columns
    shape = (layer_input.batch_size, count)
    tensors = {site: shape_to_batch(site, tensor, shape) for site, tensor in recorder.tensors.items()}
    # `keys` and `values` begin with the past: the run keeps those of its own tokens.
    return LayerRun(
        output=output,
        tensors={**tensors, Site.OUTPUT: output},
        not_exposed=(),
        router_dtypes={},
        key_values=(keys[:, :, -count:], values[:, :, -count:]),
    )
