"""The diagnosis of decoding: the known mistake that explains a layer's decoded tokens, on the port's own input.

It needs no cache to be readable: attention of the decoded tokens is computed in float32 with each mistake.
B prompts, S columns of the batch, T decoded tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from compare.diagnosis.evaluation import Evaluation, GraphNode, Stage, with_given
from compare.diagnosis.expert_pass import LayerWeights
from compare.diagnosis.mistake import Value
from compare.diagnosis.naming import RIGHT_RHO, name_mistakes
from compare.diagnosis.score import Score
from compare.diagnosis.trial import Trial, settled_tokens
from compare.diagnosis.yardstick import Yardstick
from compare.model_runs.cached_attention import DecodedInputs, attend_view, right_view
from compare.model_runs.decoding_mistakes import DECODING_MISTAKES
from compare.model_runs.passes import PassSplit, split_passes
from compare.sides.golden_weights import GoldenWeights
from compare.sides.pairing import find_mismatch
from compare.sides.port_head import on_port_input
from compare.sides.sides import Batch, Sides
from minimax_tools.capture.passes import CachePair
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import EMBEDDING
from minimax_tools.reference.float32_stages import split_heads
from minimax_tools.results.results import ModelFinding

# The first of these that the port shows judges a mistake.
_JUDGING = (Site.ATTN_CONTEXT, Site.ATTN_DELTA, Site.ATTN_RESIDUAL, Site.OUTPUT)
# Layers whose keys and values are tried in place of the layer's own.
_MOST_OTHERS = 8
# Share of an error that what explains it may leave.
_LEAST_LEFT = 0.01
_OWN = (Site.Q_ROPE, Site.K_ROPE, Site.V_PROJ)


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
    port_sides = on_port_input(sides, layer)
    site = next((site for site in _JUDGING if _is_common(sides, layer, site)), None)
    split = split_passes(sides)
    if split is None or split.decoded is None or port_sides is None or site is None or sides.weights is None:
        return ()
    takes_own = all(shown.order >= Site.ATTN_CONTEXT.order for shown in blamed)
    with sides.weights.open_layer(layer, sides.reference) as weights, torch.no_grad():
        inputs = _read_inputs(sides, layer, weights, split)
        inputs = replace(inputs, caches=dict(_other_caches(sides.target, layer, inputs)))
        # If nothing explains it over a right cache, then perhaps over what the cache holds.
        held = _read_held(sides.target, layer, inputs)
        for cached in (None,) if held is None else (None, held):
            inputs = replace(inputs, cached=cached)
            trial = _open_trial(
                port_sides, layer, inputs, site=site, takes_own=takes_own, judged=inputs.is_changed
            )
            if trial.null().leaves <= RIGHT_RHO:
                return ()
            hypotheses = [
                hypothesis for mistake in DECODING_MISTAKES for hypothesis in mistake.hypotheses(inputs)
            ]
            named = name_mistakes(trial.judge(hypotheses))
            if named or not takes_own:
                break
    return tuple(_finding(score, layer=layer, number=number, site=site) for score in named)


def is_right_on_own_cache(sides: Sides, layer: int) -> bool:
    """Decide whether a layer's decoded tokens are right, if what the port's cache holds is taken as it is.

    The golden of `sides` has the layer on the port's own input.

    Raises:
        IncomparableError: The weights are another model's.
        CheckpointError: The weights cannot be read.
    """
    site = next((site for site in _JUDGING if _is_common(sides, layer, site)), None)
    split = split_passes(sides)
    if split is None or split.decoded is None or site is None or sides.weights is None:
        return False
    with sides.weights.open_layer(layer, sides.reference) as weights, torch.no_grad():
        inputs = _read_inputs(sides, layer, weights, split)
        held = _read_held(sides.target, layer, inputs)
        if held is None:
            return False

        def leaves(cached: CachePair | None) -> float:
            given = replace(inputs, cached=cached)
            trial = _open_trial(sides, layer, given, site=site, takes_own=True, judged=inputs.is_decoded)
            return trial.null().leaves

        on_held = leaves(held)
        # In float32 what it leaves is little, and may be more than noise.
        return on_held <= RIGHT_RHO or on_held <= _LEAST_LEFT * leaves(None)


def _read_held(target: CaptureSource, layer: int, inputs: DecodedInputs) -> CachePair | None:
    """Read what the port's cache of a layer holds, float32 [B,K,S,D] each; None if mm2 does not know its form."""
    pair = target.read_cache(layer)
    spec, batch_shape = inputs.spec, inputs.attention_mask.shape
    shape = (batch_shape[0], spec.num_key_value_heads, batch_shape[1], spec.head_dim)
    if pair is None or any(tuple(part.shape) != shape for part in pair):
        return None
    return pair[0].float(), pair[1].float()


def _is_common(sides: Sides, layer: int, site: Site) -> bool:
    if any(site not in side.sites(layer) for side in (sides.reference, sides.target)):
        return False
    return find_mismatch(sides.reference.read(layer, site), sides.target.read(layer, site)) is None


def _read_inputs(sides: Sides, layer: int, weights: GoldenWeights, split: PassSplit) -> DecodedInputs:
    tokens = sides.reference.read_inputs()
    padding: dict[str, torch.Tensor] = {}
    if layer == 0:
        # The input of padding is known in front of the first layer alone: behind it, it depends on the port.
        table = weights.tensors.reader
        # The batch's own padding first, then the 0 that a port pads a bucket with.
        for token in dict.fromkeys([*tokens.input_ids[tokens.attention_mask == 0].tolist()[:1], 0]):
            row = torch.empty(1, weights.spec.hidden_size, dtype=weights.tensors.dtype)
            table.read_weight_into(EMBEDDING, row, rows=range(token, token + 1))
            padding[f"token {token}"] = row[0].float()
    return DecodedInputs(
        spec=weights.spec,
        weights=LayerWeights(weights.tensors),
        attention_mask=tokens.attention_mask,
        position_ids=tokens.position_ids,
        # Decoded tokens are computed as if they were prefilled; mistakes replace what they read.
        decode_start=tokens.attention_mask.shape[1],
        numbers=split.numbers,
        caches={},
        padding=padding,
    )


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


def _open_trial(
    sides: Sides, layer: int, inputs: DecodedInputs, *, site: Site, takes_own: bool, judged: torch.Tensor
) -> Trial:
    """Build the trial of some decoded tokens, `judged` [B,S]; `sides` have the golden on the port's own input."""
    golden, target = sides.reference, sides.target
    tokens = judged.flatten().nonzero().flatten()
    batch = Batch(judged)
    is_padding = (inputs.attention_mask == 0)[..., None]
    given = {Site.INPUT: golden.read(layer, Site.INPUT).float()}
    on_input = Evaluation(inputs, with_given(given), tokens=tokens)
    # Over what the port's cache holds, if that is to be taken as it is.
    attention: dict[GraphNode, Stage] = {}
    if inputs.cached is not None:
        attention[Site.ATTN_CONTEXT] = lambda evaluation: attend_view(evaluation, right_view(evaluation))
    if takes_own and set(_OWN) <= set(target.sites(layer)):
        own = {shown: target.read(layer, shown).float() for shown in _OWN}
        own[Site.V_PROJ] = own[Site.V_PROJ].masked_fill(is_padding, 0.0)
        given |= own
    base = Evaluation(inputs, {**with_given(given), **attention}, tokens=tokens)
    exact_on_input, exact = on_input.rows(site), base.rows(site)
    port = batch.rows(target.read(layer, site), site).float()
    settled = settled_tokens(on_input, 0.0)
    yardstick = Yardstick.of(
        port=port,
        # The golden's rounding errors, on what the port computed from.
        golden=batch.rows(golden.read(layer, site), site).float() - exact_on_input + exact,
        exact=exact,
        settled=settled,
        dtype=inputs.weights.dtype,
    )
    return Trial(
        base=base,
        on_golden_values=None,
        yardsticks={site: yardstick},
        logit_noise=0.0,
        is_decoded=torch.zeros(len(tokens), dtype=torch.bool),
        is_usable=port.isfinite().all(-1),
    )


def _finding(score: Score, *, layer: int, number: int, site: Site) -> ModelFinding:
    (mistake,), (parameters,) = score.hypothesis.mistakes, score.hypothesis.parameters
    described: dict[str, Value] = dict(parameters)
    return ModelFinding(
        number=number,
        layer=layer,
        sites=(str(site),),
        reason=f"with this mistake in the float32 layer, ρ of {site} falls from {score.unexplained:.3g} to "
        f"{score.leaves:.3g}",
        mistake=mistake.name,
        what=mistake.what,
        look_at=mistake.look_at,
        parameters=described,
        is_of_sites=True,
    )
