"""Decoded tokens of a whole port's layer, recomputed: over the right keys and values, or over what its cache holds.

B prompts, S columns of the batch, K kv heads, D head_dim, T decoded tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from compare.catalogue.cached_attention import DecodedInputs, attend_view, right_view
from compare.model_runs.passes import split_passes
from compare.noise.yardstick import RIGHT_RHO, Yardstick, is_enough, trimmed_mean
from compare.sides.golden_weights import GoldenWeights
from compare.sides.pairing import find_mismatch
from compare.sides.sides import Batch, Sides
from minimax_tools.capture.passes import CachePair
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import EMBEDDING
from minimax_tools.reference.evaluation import Evaluation, GraphNode, Stage, with_given
from minimax_tools.reference.expert_pass import LayerWeights

# The first of these that the port shows judges a mistake.
_JUDGING = (Site.ATTN_CONTEXT, Site.ATTN_DELTA, Site.ATTN_RESIDUAL, Site.OUTPUT)
_OWN = (Site.Q_ROPE, Site.K_ROPE, Site.V_PROJ)
# Share of an error that what explains it may leave.
_LEAST_LEFT = 0.01


def is_right_on_own_cache(sides: Sides, layer: int) -> bool:
    """Decide whether a layer's decoded tokens are right, if what the port's cache holds is taken as it is.

    The golden of `sides` has the layer on the port's own input.

    Raises:
        IncomparableError: The weights are another model's.
        CheckpointError: The weights cannot be read.
    """
    site = judging_site(sides, layer)
    with open_decoded(sides, layer) as inputs:
        held = None if inputs is None else read_held(sides.target, layer, inputs)
        if inputs is None or held is None or site is None:
            return False

        def leaves(cached: CachePair | None) -> float:
            _, yardstick = measure_decoded(
                sides,
                layer,
                replace(inputs, cached=cached),
                site=site,
                takes_own=True,
                judged=inputs.is_decoded,
            )
            judged = yardstick.port.isfinite().all(-1)
            misfits = yardstick.misfit(yardstick.exact, yardstick.variance)[judged]
            return math.sqrt(trimmed_mean(misfits)) if is_enough(judged) else math.inf

        on_held = leaves(held)
        # In float32 what it leaves is little, and may be more than noise.
        return on_held <= RIGHT_RHO or on_held <= _LEAST_LEFT * leaves(None)


def judging_site(sides: Sides, layer: int) -> Site | None:
    """Return the site by which a layer's decoded tokens are judged; None if the sides have none in common."""

    def is_common(site: Site) -> bool:
        if any(site not in side.sites(layer) for side in (sides.reference, sides.target)):
            return False
        return find_mismatch(sides.reference.read(layer, site), sides.target.read(layer, site)) is None

    return next(filter(is_common, _JUDGING), None)


@contextmanager
def open_decoded(sides: Sides, layer: int) -> Iterator[DecodedInputs | None]:
    """Open a layer's weights and inputs; None if no token was decoded, or the weights are not known."""
    split = split_passes(sides)
    if split is None or split.decoded is None or sides.weights is None:
        yield None
        return
    with sides.weights.open_layer(layer, sides.reference) as weights, torch.no_grad():
        tokens = sides.reference.read_inputs()
        yield DecodedInputs(
            spec=weights.spec,
            graph=weights.spec.graph.layer(layer),
            weights=LayerWeights(weights.tensors),
            attention_mask=tokens.attention_mask,
            position_ids=tokens.position_ids,
            # Decoded tokens are computed as if they were prefilled; mistakes replace what they read.
            decode_start=tokens.attention_mask.shape[1],
            numbers=split.numbers,
            caches={},
            # The input of padding is known in front of the first layer alone: behind it, it depends on the port.
            padding=_read_padding(sides, weights) if layer == 0 else {},
        )


def _read_padding(sides: Sides, weights: GoldenWeights) -> dict[str, torch.Tensor]:
    """Read the embedding of the batch's own padding, and of the 0 that a port pads a bucket with."""
    tokens = sides.reference.read_inputs()
    padding = {}
    for token in dict.fromkeys([*tokens.input_ids[tokens.attention_mask == 0].tolist()[:1], 0]):
        row = torch.empty(1, weights.spec.hidden_size, dtype=weights.tensors.dtype)
        weights.tensors.reader.read_weight_into(EMBEDDING, row, rows=range(token, token + 1))
        padding[f"token {token}"] = row[0].float()
    return padding


def read_held(target: CaptureSource, layer: int, inputs: DecodedInputs) -> CachePair | None:
    """Read what the port's cache of a layer holds, float32 [B,K,S,D] each; None if mm2 does not know its form."""
    pair = target.read_cache(layer)
    spec, (batch_size, length) = inputs.spec, inputs.attention_mask.shape
    shape = (batch_size, spec.num_key_value_heads, length, spec.head_dim)
    if pair is None or any(tuple(part.shape) != shape for part in pair):
        return None
    return pair[0].float(), pair[1].float()


def measure_decoded(
    sides: Sides, layer: int, inputs: DecodedInputs, *, site: Site, takes_own: bool, judged: torch.Tensor
) -> tuple[Evaluation, Yardstick]:
    """Evaluate some decoded tokens, `judged` [B,S], and measure the noise of a site there.

    The golden of `sides` has the layer on the port's own input. With `takes_own`, queries, keys and values are the
    port's own, where it shows them.
    """
    golden, target, batch = sides.reference, sides.target, Batch(judged)
    tokens = judged.flatten().nonzero().flatten()
    given = {Site.INPUT: golden.read(layer, Site.INPUT).float()}
    on_input = Evaluation(inputs, with_given(given), tokens=tokens)
    # Over what the port's cache holds, if that is to be taken as it is.
    attention: dict[GraphNode, Stage] = {}
    if inputs.cached is not None:
        attention[Site.ATTN_CONTEXT] = lambda evaluation: attend_view(evaluation, right_view(evaluation))
    if takes_own and set(_OWN) <= set(target.sites(layer)):
        given |= {shown: target.read(layer, shown).float() for shown in _OWN}
        is_padding = (inputs.attention_mask == 0)[..., None]
        given[Site.V_PROJ] = given[Site.V_PROJ].masked_fill(is_padding, 0.0)
    base = Evaluation(inputs, {**with_given(given), **attention}, tokens=tokens)
    exact_on_input, exact = on_input.rows(site), base.rows(site)
    return base, Yardstick.of(
        port=batch.rows(target.read(layer, site), site).float(),
        # The golden's rounding errors, on what the port computed from.
        golden=batch.rows(golden.read(layer, site), site).float() - exact_on_input + exact,
        exact=exact,
        settled=torch.ones(len(tokens), dtype=torch.bool),
        dtype=inputs.weights.dtype,
    )
