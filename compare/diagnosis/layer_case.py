"""LayerCase: all that a layer's hypotheses are judged by, read from two captures and the checkpoint.

B batch, S sequence, T real tokens, F channels.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from compare.batch import Batch
from compare.diagnosis.evaluation import Evaluation, Scene, with_given
from compare.diagnosis.layer_weights import LayerWeights
from compare.diagnosis.stages import STAGES
from compare.diagnosis.trial import Trial, settled_tokens
from compare.diagnosis.yardstick import Yardstick
from compare.feed import fed_sites
from minimax_tools.capture.source import CaptureSource
from minimax_tools.decoded_rows import decoded_rows
from minimax_tools.inputs import Inputs
from minimax_tools.sites import Site
from minimax_tools.spec import ModelSpec

# Their values are choices, or lie in an order of the port's own.
_NOT_JUDGED = (Site.INPUT, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS)
# Of the router's logits, where the golden does not keep them.
_RELATIVE_LOGIT_NOISE = 5e-3


def make_scene(inputs: Inputs, weights: LayerWeights, spec: ModelSpec, *, num_decoded: int) -> Scene:
    """What a layer was run on."""
    mask = inputs.attention_mask
    start = decoded_rows(mask, num_decoded).start if num_decoded else mask.shape[1]
    return Scene(
        spec=spec,
        weights=weights,
        attention_mask=mask,
        position_ids=inputs.position_ids,
        decode_start=start,
    )


def judging_sites(
    reference: CaptureSource, target: CaptureSource, layer: int, suspects: Iterable[Site]
) -> tuple[Site, ...]:
    """The sites that judge a layer: the suspects that both sides hold, and the last one that the run computes.

    A router is judged by what the experts give; a layer without suspects by its deltas too.
    """
    fed = fed_sites(target)
    both = [
        site
        for site in reference.sites(layer)
        if site in target.sites(layer) and site not in _NOT_JUDGED and site not in fed
    ]
    wanted = set(suspects) or {Site.ATTN_DELTA, Site.MOE_DELTA}
    if wanted & {Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS}:
        wanted.add(Site.MOE_DELTA)
    return tuple(site for site in both if site in wanted or site is both[-1])


def open_trial(
    reference: CaptureSource,
    target: CaptureSource,
    *,
    scene: Scene,
    layer: int,
    sites: tuple[Site, ...],
    dtype: torch.dtype,
) -> Trial:
    """What judges the hypotheses of one layer, of all real tokens.

    Args:
        reference: The golden; it holds the layer's input, and the sites.
        target: The device run, fed the golden's own values.
        scene: What the layer is run on.
        layer: The layer.
        sites: The sites that judge.
        dtype: What the golden computed in.
    """
    batch = Batch(scene.attention_mask)
    tokens = scene.real_tokens
    base = Evaluation(scene, with_given(STAGES, _read_fed(reference, target, layer)), tokens=tokens)
    port = {site: batch.rows(target.read(layer, site), site).float() for site in sites}
    is_usable = torch.stack([rows.isfinite().all(-1) for rows in port.values()]).all(0)
    noise = _logit_noise(reference, base, batch, layer)
    settled = settled_tokens(base, noise)
    yardsticks = {
        site: Yardstick.of(
            port=rows,
            golden=batch.rows(reference.read(layer, site), site).float(),
            exact=base.rows(site),
            settled=settled,
            dtype=dtype,
        )
        for site, rows in port.items()
    }
    length = scene.attention_mask.shape[1]
    return Trial(
        base=base,
        yardsticks=yardsticks,
        logit_noise=noise,
        is_decoded=tokens % length >= scene.decode_start,
        is_usable=is_usable,
    )


def _read_fed(reference: CaptureSource, target: CaptureSource, layer: int) -> dict[Site, torch.Tensor]:
    """The golden's values of the layer's input and of all that the run was fed."""
    fed = {site: reference.read(layer, site) for site in {Site.INPUT, *fed_sites(target)}}
    return {
        site: value.float() if value.is_floating_point() else value.long() for site, value in fed.items()
    }


def _logit_noise(reference: CaptureSource, base: Evaluation, batch: Batch, layer: int) -> float:
    """Standard deviation of the golden's error on the router's logits."""
    exact = base[Site.ROUTER_LOGITS]
    if Site.ROUTER_LOGITS in reference.sites(layer):
        golden = batch.rows(reference.read(layer, Site.ROUTER_LOGITS), Site.ROUTER_LOGITS).float()
        return float((golden - exact).square().mean().sqrt())
    return _RELATIVE_LOGIT_NOISE * float(exact.square().mean().sqrt())


def spread_places(num_tokens: int, lengths: Iterable[int], most: int) -> torch.Tensor:
    """Some of the tokens, ascending: evenly spread, and the last of each prompt."""
    if num_tokens <= most:
        return torch.arange(num_tokens)
    last = torch.tensor(list(lengths)).cumsum(0) - 1
    even = torch.linspace(0, num_tokens - 1, most - min(len(last), most // 2)).round().long()
    return torch.cat((even, last[: most // 2])).unique()


