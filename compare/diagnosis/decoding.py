"""The diagnosis of decoding: the known mistake that explains a layer's decoded tokens, on the port's own input.

B prompts, S columns of the batch, K kv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from compare.catalogue.cached_attention import DecodedInputs
from compare.catalogue.decoding import DECODING_MISTAKES
from compare.catalogue.words import Place
from compare.diagnosis.score import Score, name_mistakes
from compare.diagnosis.trial import Trial
from compare.model_runs.findings import named_finding
from compare.model_runs.own_cache import judging_site, measure_decoded, open_decoded, read_held
from compare.noise.yardstick import RIGHT_RHO
from compare.sides.port_head import on_port_input
from compare.sides.sides import Sides
from minimax_tools.capture.passes import CachePair
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import Evaluation, with_given
from minimax_tools.reference.float32_stages import split_heads
from minimax_tools.results.results import ModelFinding

# Layers whose keys and values are tried in place of the layer's own.
_MOST_OTHERS = 8


def diagnose_decoding(
    sides: Sides, layer: int, *, number: int, blamed: Iterable[Site] = ()
) -> tuple[ModelFinding, ...]:
    """Name the mistakes of decoding that explain a layer whose prefill is right; () if none does.

    Args:
        sides: Both captures, of a whole port's run, with the golden's weights.
        layer: The first layer whose decoded tokens are wrong.
        number: The first step that is wrong.
        blamed: Sites of the layer to blame there. Unless queries, keys or values are among them, the port's own are
            taken as they are, and only what it reads of the cache is in question.

    Raises:
        IncomparableError: The weights are another model's.
        CheckpointError: The weights cannot be read.
    """
    port_sides, site = on_port_input(sides, layer), judging_site(sides, layer)
    takes_own = all(shown.order >= Site.ATTN_CONTEXT.order for shown in blamed)
    with open_decoded(sides, layer) as inputs:
        if inputs is None or port_sides is None or site is None:
            return ()
        inputs = replace(inputs, caches=dict(_other_caches(sides.target, layer, inputs)))
        # If nothing explains it over a right cache, then perhaps over what the cache holds.
        held = read_held(sides.target, layer, inputs)
        for cached in (None,) if held is None else (None, held):
            inputs = replace(inputs, cached=cached)
            trial = _open_trial(port_sides, layer, inputs, site=site, takes_own=takes_own)
            if trial.null().leaves <= RIGHT_RHO:
                return ()
            hypotheses = [
                hypothesis for mistake in DECODING_MISTAKES for hypothesis in mistake.hypotheses(inputs)
            ]
            named = name_mistakes(trial.judge(hypotheses))
            if named or not takes_own:
                break
    return tuple(_finding(score, layer=layer, number=number, site=site) for score in named)


def _other_caches(
    target: CaptureSource, layer: int, inputs: DecodedInputs
) -> Iterator[tuple[int, CachePair]]:
    """Yield the right keys and values of the nearest layers, float32 [B,K,S,D], on the port's own input of each."""
    head_dim = inputs.spec.head_dim
    others = (other for other in target.layers if other != layer)
    for other in sorted(others, key=lambda other: abs(other - layer))[:_MOST_OTHERS]:
        shown = set(target.sites(other))
        if {Site.K_ROPE, Site.V_PROJ} <= shown:
            keys, values = target.read(other, Site.K_ROPE).float(), target.read(other, Site.V_PROJ).float()
        elif Site.INPUT in shown and inputs.weights.has_layer(other):
            states = target.read(other, Site.INPUT).float()
            computed = Evaluation(
                replace(inputs, weights=inputs.weights.of_layer(other)),
                with_given({Site.INPUT: states}),
                tokens=inputs.judged_tokens,
            )
            keys, values = computed[Site.K_ROPE], computed[Site.V_PROJ]
        else:
            continue
        yield other, (keys, split_heads(values, head_dim))


def _open_trial(sides: Sides, layer: int, inputs: DecodedInputs, *, site: Site, takes_own: bool) -> Trial:
    base, yardstick = measure_decoded(
        sides, layer, inputs, site=site, takes_own=takes_own, judged=inputs.is_changed
    )
    return Trial(
        base=base,
        on_golden_values=None,
        yardsticks={site: yardstick},
        logit_noise=0.0,
        is_decoded=torch.zeros(len(base.tokens), dtype=torch.bool),
        is_usable=yardstick.port.isfinite().all(-1),
    )


def _finding(score: Score, *, layer: int, number: int, site: Site) -> ModelFinding:
    (mistake,), (parameters,) = score.hypothesis.mistakes, score.hypothesis.parameters
    finding = named_finding(
        mistake.name,
        number=number,
        layer=layer,
        site=str(site),
        reason=f"with this mistake in the float32 layer, ρ of {site} falls from {score.unexplained:.3g} to "
        f"{score.leaves:.3g}",
        parameters=parameters,
        place=Place.DECODING,
    )
    return replace(finding, is_of_sites=True)
