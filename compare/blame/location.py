"""Location: the tokens, channels, heads or experts in which the error of a blamed site lies, told in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from compare.blame.recompute import Recomputed
from compare.blame.sentences import Bounds, TokenFacts, Where, describe_regions
from compare.judging.layer_judge import LayerJudge
from compare.noise.rows import Rows
from compare.sides.sides import Sides
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.inputs import decoded_tokens
from minimax_tools.model.sites import BEHIND_EXPERTS, Site
from minimax_tools.results.results import Blame, SiteResult

# Sites whose error may lie in the tokens of some experts, and sites whose channels are heads side by side.
_OF_HEADS = (
    Site.Q_PROJ,
    Site.K_PROJ,
    Site.V_PROJ,
    Site.Q_NORM,
    Site.K_NORM,
    Site.Q_ROPE,
    Site.K_ROPE,
    Site.ATTN_CONTEXT,
)


def locate_blamed(
    results: Mapping[Site, SiteResult],
    blame: tuple[Blame, ...],
    *,
    judge: LayerJudge,
    recomputed: Mapping[Site, Recomputed],
    sides: Sides,
) -> Mapping[Site, SiteResult]:
    """Add where wrong tokens and channels lie to the results of the blamed sites of one layer."""
    # The classic limits (cosine and the like) judge whole outputs, no single tokens.
    if sides.is_classic:
        return results
    located = dict(results)
    # The last site of a blame failed; those before it were not compared.
    for site in {Site(blamed.sites[-1]) for blamed in blame}:
        rows = recomputed[site].rows if site in recomputed else judge.judged_rows(site)
        where = _locate(results[site], rows, judge=judge, sides=sides)
        located[site] = replace(
            results[site], where=where.sentences, regions=where.regions, wrong_tokens=where.tokens
        )
    return located


def _locate(result: SiteResult, rows: Rows | None, *, judge: LayerJudge, sides: Sides) -> Where:
    """Locate an error in `rows`: the judged tokens of both sides, [T,F], and their `places` [T,2] (prompt, column)."""
    layer, site = result.layer, Site(result.site)
    if layer is None or rows is None or rows.num_tokens == 0 or not rows.has_floor:
        return Where()
    bounds = _bounds(site, rows, sides)
    if bounds is None:
        return Where()
    return describe_regions(
        rows,
        bounds=bounds,
        is_right=partial(judge.is_right, site),
        facts=TokenFacts(
            positions=_read_positions(rows, sides.reference),
            decoded=_find_decoded(rows, sides),
            experts=_read_experts(layer, rows, sides) if site in BEHIND_EXPERTS else None,
            later_rows=_find_later_rows(sides),
        ),
        head_dim=_head_dim(layer, sides.reference) if site in _OF_HEADS else None,
        channel_word="expert" if site is Site.ROUTER_LOGITS else "channel",
    )


def _bounds(site: Site, rows: Rows, sides: Sides) -> Bounds | None:
    """Return the limits on one token and one channel; None if the criteria limit no token at this site."""
    # Without a twin, ρ is estimated from the floor's statistics.
    limits = sides.criteria.noise.of_ratios(
        is_chained=False, is_estimated=rows.twin is None, is_widened=rows.widened_floor is not None
    )
    token, channel = limits.find(site, "token_worst"), limits.find(site, "channel_worst")
    if token is None:
        return None
    num_tokens, num_channels = rows.reference.shape
    # The share of false alarms is for the worst of all tokens or channels. Here each is tried, so each has its part.
    # The limit itself also depends on the number of judged tokens.
    token_share, channel_share = sides.criteria.share / num_tokens, sides.criteria.share / num_channels
    return Bounds(
        token=token.at(num_tokens=num_tokens, share=token_share),
        channel=None if channel is None else channel.at(num_tokens=num_tokens, share=channel_share),
    )


def _find_decoded(rows: Rows, sides: Sides) -> torch.Tensor | None:
    """Find the tokens that were decoded one at a time, bool [T]; None if none was, or nobody knows."""
    description, mask = sides.target.known_description, sides.reference.read_attention_mask()
    if description is None or not description.run.num_decoded or mask is None:
        return None
    is_decoded = decoded_tokens(mask, description.run.num_decoded, by_row=description.run.decodes_by_row)
    return is_decoded[rows.places[:, 0], rows.places[:, 1]]


def _find_later_rows(sides: Sides) -> tuple[int, ...]:
    """Return the rows of the second call of each layer; () if there was one call, or nobody knows."""
    description = sides.target.known_description
    calls = () if description is None else description.calls
    return tuple(sorted(calls[-1])) if len(calls) > 1 else ()


def _read_experts(layer: int, rows: Rows, sides: Sides) -> torch.Tensor | None:
    """Return the experts of each judged token, [T,k]: the port's if it shows them, else the golden's."""
    reference, target = sides.reference, sides.target
    if not {Site.ROUTER_EXPERTS, Site.ROUTER_LOGITS} <= set(reference.sites(layer)):
        return None
    num_experts = reference.read(layer, Site.ROUTER_LOGITS).shape[-1]
    for side in (target, reference):
        if Site.ROUTER_EXPERTS not in side.sites(layer):
            continue
        experts = side.read(layer, Site.ROUTER_EXPERTS).long()
        # A port may name experts that do not exist.
        if bool(((experts >= 0) & (experts < num_experts)).all()):
            # Experts may be stored flat, as [B·S,k].
            batched = experts.unflatten(0, _batch_shape(sides)) if experts.ndim == 2 else experts
            return batched[rows.places[:, 0], rows.places[:, 1]]
    return None


def _read_positions(rows: Rows, reference: CaptureSource) -> torch.Tensor | None:
    """Return the position of each judged token, [T]; None if it is the token's place in its row, or not known."""
    if reference.known_description is None:
        return None
    positions = reference.read_inputs().position_ids[rows.places[:, 0], rows.places[:, 1]]
    return None if torch.equal(positions, rows.places[:, 1]) else positions


def _batch_shape(sides: Sides) -> tuple[int, int]:
    """Return the numbers of prompts and columns of the batch; without a mask, one prompt of any length (-1)."""
    mask = sides.reference.read_attention_mask()
    return (1, -1) if mask is None else (mask.shape[0], mask.shape[1])


def _head_dim(layer: int, reference: CaptureSource) -> int | None:
    """Return D, from a site that stores heads in a dimension of their own; None without one."""
    for site in (Site.K_ROPE, Site.Q_ROPE):
        if site in reference.sites(layer):
            return reference.read(layer, site).shape[-1]
    return None
