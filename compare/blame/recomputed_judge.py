"""RecomputingJudge: judges sites of one layer, each recomputed from the port's own values of its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property

from compare.blame.recompute import Recomputation
from compare.judging.layer_judge import LayerJudge
from compare.noise.rows import Rows
from compare.sides.golden_weights import GoldenWeights
from compare.sides.pairing import find_mismatch
from compare.sides.sides import Sides
from minimax_tools.model.sites import SITE_INPUTS, Site
from minimax_tools.results.results import SiteResult, SiteStatus


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recomputed:
    """A site judged on the port's own values of its inputs."""

    result: SiteResult
    rows: Rows | None = None  # the judged rows; None for a choice of experts, and for a wrong shape or dtype
    own: frozenset[Site] = frozenset()  # the inputs of which the port's values were taken, not the golden's


class RecomputingJudge:
    """Judges sites of one layer on the port's own values of their inputs; the layer's input is the golden's.

    A context manager: the weights are opened when the first site needs them, and closed with the block.
    """

    def __init__(self, sides: Sides, *, layer: int, judge: LayerJudge) -> None:
        self._sides = sides
        self._layer = layer
        self._judge = judge
        self._stack = ExitStack()

    @cached_property
    def _recomputation(self) -> Recomputation | None:
        source, golden = self._sides.weights, self._sides.reference
        if source is None or self._sides.is_classic or golden.known_description is None:
            return None

        def open_weights() -> GoldenWeights:
            return self._stack.enter_context(source.open_layer(self._layer, golden))

        return Recomputation(self._sides, layer=self._layer, open_weights=open_weights)

    def __enter__(self) -> RecomputingJudge:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def judge_sites(self, sites: tuple[Site, ...], *, failing: frozenset[Site]) -> Mapping[Site, Recomputed]:
        """Judge some sites, in execution order; `failing` are all failing sites of the layer.

        A site is left out if:

        - the golden is not mm2's own, or the weights are not known
        - a side lacks one of the site's inputs, or holds NaN or Inf there
        - the golden has no floor, and the site is the choice of experts or attention

        Raises:
            IncomparableError: The weights are another model's.
            CheckpointError: They cannot be read.
        """
        judged: dict[Site, Recomputed] = {}
        # Sites that may be wrong by themselves; one that is right on the port's own values is not.
        doubted = set(failing)
        for site in sites:
            recomputed = self._judge_site(site, doubted=frozenset(doubted))
            if recomputed is not None:
                judged[site] = recomputed
                if recomputed.result.status is not SiteStatus.FAIL:
                    doubted.discard(site)
        return judged

    def judgements(self, site: Site, *, doubted: frozenset[Site]) -> Iterator[Recomputed]:
        """Yield the judgements of one site on each of its possible inputs; none if it cannot be computed.

        Possible are the port's values, which come first, and the golden's in place of those of `doubted` sites (see
        `Recomputation.rows`).
        """
        reference, target = self._sides.reference, self._sides.target
        if self._recomputation is None:
            return
        held = set(reference.sites(self._layer)) & set(target.sites(self._layer))
        if not {site, *SITE_INPUTS[site]} <= held:
            return
        result = SiteResult(layer=self._layer, site=str(site), status=SiteStatus.FAIL)
        mismatch = find_mismatch(reference.read(self._layer, site), target.read(self._layer, site))
        if mismatch is not None:
            # A wrong shape or dtype is the site's own fault if its inputs have the right ones.
            if self._recomputation.has_inputs(site):
                yield Recomputed(result=replace(result, reason=mismatch))
        elif site is Site.ROUTER_EXPERTS:
            yield from self._judge_choice(result)
        else:
            stored = self._judge.stored_rows(site)
            for rows, own in self._recomputation.rows(site, stored, doubted=doubted):
                yield Recomputed(result=_name_inputs(self._judge.judge_rows(site, rows)), rows=rows, own=own)

    def _judge_choice(self, result: SiteResult) -> Iterator[Recomputed]:
        noise = self._judge.router_noise
        assert self._recomputation is not None, "only what can be recomputed is judged"
        choice = None if noise is None else self._recomputation.choice(noise)
        if choice is not None:
            judged = self._judge.judge_choice(result, *choice)
            yield Recomputed(result=_name_inputs(judged), own=frozenset({Site.ROUTER_LOGITS}))

    def _judge_site(self, site: Site, *, doubted: frozenset[Site]) -> Recomputed | None:
        """Judge one site on each of its possible inputs: it passes if it does on any; None if none can be computed."""
        first: Recomputed | None = None
        for recomputed in self.judgements(site, doubted=doubted):
            if recomputed.result.status is not SiteStatus.FAIL:
                return recomputed
            first = first or recomputed
        return first


def _name_inputs(result: SiteResult) -> SiteResult:
    """Add the inputs that a result rests on to its reason."""
    if not result.reason:
        return result
    inputs = sorted(SITE_INPUTS[Site(result.site)], key=lambda site: site.order)
    names = ", ".join(str(site) for site in inputs)
    return replace(result, reason=f"{result.reason}, given the port's own {names}")
