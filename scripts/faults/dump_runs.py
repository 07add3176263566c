"""Chained runs of the planted port over a whole model, as dumps of other tools show them.

In a chained run each layer computes on the output of the layer before. A mistake is planted in one layer from the third
on, so that layers before it are right and layers behind it compute on wrong inputs. A view is a choice of the sites
that a tool may dump.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from port_runs import run_port

from compare.comparer import compare_captures
from compare.sides.golden_weights import CheckpointWeights
from faults.baseline import Baseline, BaselineRequest
from faults.cases import WHOLE, DumpCase
from faults.effects import measure_effects
from faults.judging import as_black_box, default_criteria, hide_sites
from faults.plant import Plant
from faults.port import PlantedPort
from faults.runs import may_show
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import CaptureSource
from minimax_tools.dumps.opening import DumpReading, open_sides
from minimax_tools.errors import IncomparableError
from minimax_tools.model.run import full_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import Verdict
from neuron.devices.runtime import Runtime

# The first layer in which a mistake is planted.
_FIRST_LAYER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDump:
    """A chained run of the planted port over a whole model."""

    request: BaselineRequest  # description of the baseline
    plant: Plant | None = None  # the mistake; None for a right port
    layer: int | None = None  # layer of the mistake; None for a right port

    @property
    def backend(self) -> str:
        """Device of the run."""
        return "cpu"

    def __str__(self) -> str:
        return f"{self.request.name}: {self.plant or 'right'} in layer {self.layer}, chained"


def plan_dumps(request: BaselineRequest, plants: Sequence[Plant]) -> Iterator[PlannedDump]:
    """Plan a right port, and each plant that may show, in a random layer; plan nothing if the model is too short."""
    layers = range(_FIRST_LAYER, request.num_layers)
    if not layers:
        return
    yield PlannedDump(request=request)
    for plant in plants:
        if plant.prefills and may_show(plant, request):
            layer = random.Random(f"{request.seed} {plant}").choice(layers)
            yield PlannedDump(request=request, plant=plant, layer=layer)


def carry_out_dump(
    planned: PlannedDump, baseline: Baseline, *, runtime: Runtime, directory: Path
) -> tuple[DumpCase, ...]:
    """Run the whole model, and judge each view of it with the checkpoint and without."""
    plant, layer = planned.plant, planned.layer
    layers = frozenset() if layer is None else frozenset({layer})
    capture = run_port(
        baseline.golden,
        PlantedPort(plant=plant, layers=layers).target(),
        full_run(baseline.spec.num_hidden_layers, sites_level="all", graph=baseline.spec.graph),
        reader=baseline.reader,
        runtime=runtime,
        directory=directory,
    )
    effects = {} if plant is None or layer is None else measure_effects(baseline, layer, plant)
    cases = []
    for view, source in _open_views(capture, baseline.golden, directory.with_name("dump")):
        for has_checkpoint in (True, False):
            verdict, blamed, reason = _judge(baseline, source, has_checkpoint=has_checkpoint)
            cases.append(
                DumpCase(
                    run=str(planned),
                    baseline=planned.request.name,
                    view=view,
                    has_checkpoint=has_checkpoint,
                    verdict=str(verdict),
                    layer=layer,
                    **(plant.record if plant else {}),
                    shown=() if layer is None else tuple(str(site) for site in source.sites(layer)),
                    effects={str(site): effect for site, effect in effects.items()},
                    blamed=blamed,
                    reason=reason,
                    model=planned.request.model_name,
                )
            )
    return tuple(cases)


def _open_views(capture: Capture, golden: Capture, directory: Path) -> Iterator[tuple[str, CaptureSource]]:
    """Yield the views in which the run is judged, by name: the names of `DumpCase.view`."""
    yield WHOLE, capture
    yield "no_experts", hide_sites(capture, [Site.ROUTER_EXPERTS])
    yield "outputs", as_black_box(capture)
    shutil.rmtree(directory, ignore_errors=True)
    yield TOOL, dump_as_vllm_neuron(capture, golden, directory)


def _judge(
    baseline: Baseline, source: CaptureSource, *, has_checkpoint: bool
) -> tuple[Verdict, tuple[tuple[int | None, tuple[str, ...]], ...], str]:
    """Return the verdict, the blamed layers and sites, and the reason of the first blame or why it is incomparable."""
    try:
        comparison = compare_captures(
            baseline.golden,
            source,
            criteria=default_criteria(),
            layer_pattern="layer_*",
            weights=CheckpointWeights(model=str(baseline.folder)) if has_checkpoint else None,
        )
    except IncomparableError as error:
        return Verdict.INCOMPARABLE, (), str(error)
    blamed = tuple((blame.layer, blame.sites) for blame in comparison.blame)
    return comparison.verdict, blamed, comparison.blame[0].reason if comparison.blame else ""


TOOL = "vllm_neuron"
# The number of tokens of a dump is rounded up to a multiple of it.
_BUCKET = 64
# Modules of a layer that the writer dumps, and the site that the first output of each is.
_MODULES = {
    "input_layernorm": Site.INPUT_NORM,
    "self_attn.q_proj": Site.Q_PROJ,
    "self_attn.k_proj": Site.K_PROJ,
    "self_attn.v_proj": Site.V_PROJ,
    "self_attn.q_norm": Site.Q_NORM,
    "self_attn.k_norm": Site.K_NORM,
    "self_attn.o_proj": Site.ATTN_DELTA,
    "post_attention_layernorm": Site.POST_NORM,
    "block_sparse_moe.gate": Site.ROUTER_LOGITS,
    "block_sparse_moe": Site.MOE_DELTA,
}


def dump_as_vllm_neuron(capture: Capture, golden: Capture, directory: Path) -> CaptureSource:
    """Write a run as vLLM Neuron would into a new directory, and open it as `mm2-compare` does.

    The run's rows are padded on the right. The dump has the batch of the golden.
    """
    mask = capture.read_attention_mask().bool()
    num_tokens = int(mask.sum())
    size = math.ceil(num_tokens / _BUCKET) * _BUCKET
    name = f"prefill_s{size}_0"
    for module, values in _shown_modules(capture):
        folder = directory / "dp0" / name / module
        folder.mkdir(parents=True)
        # A site's values are [B,S,F], but those of the router are [B·S,F]: padding is left out of both.
        tokens = values.unflatten(0, mask.shape)[mask] if values.ndim == 2 else values[mask]
        torch.save(_fill(tokens, size), folder / "rank0.pt")
    lengths = [int(row.sum()) for row in mask]
    positions = [position for length in lengths for position in range(length)]
    meta = {
        "req_ids": [str(row) for row in range(len(lengths))],
        "positions": positions + [0] * (size - num_tokens),
        "dp_rank": 0,
    }
    (directory / "dp0" / f"{name}_meta.json").write_text(json.dumps(meta))
    _, dump = open_sides(
        golden.directory, directory, reference_reading=DumpReading(), target_reading=DumpReading()
    )
    return dump


def _shown_modules(capture: Capture) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the modules that the writer shows, by name, with their values."""
    yield "model.embed_tokens", capture.read(None, ModelSite.EMBEDDING)
    for layer in capture.layers:
        sites = capture.sites(layer)
        for module, site in _MODULES.items():
            if site in sites:
                yield f"model.layers.{layer}.{module}", capture.read(layer, site)
        yield f"model.layers.{layer}", capture.read(layer, Site.OUTPUT)
    yield "model.norm", capture.read(None, ModelSite.FINAL_NORM)
    yield "lm_head", capture.read(None, ModelSite.LOGITS)


def _fill(tokens: torch.Tensor, size: int) -> torch.Tensor:
    """Pad tokens [T,F] with NaN at the end."""
    return torch.cat((tokens, tokens.new_full((size - len(tokens), tokens.shape[1]), float("nan"))))
