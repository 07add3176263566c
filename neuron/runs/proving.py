"""Proving: a mistake is undone in a layer of a port, and the layer is judged again.

It is undone in the layer's tensors before the port converts them, or in what a stage gives while the port runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from compare.catalogue.repairs import lines_for_layers
from compare.catalogue.undo import Undo, join_hypotheses, undo_finding
from compare.comparer import compare_captures
from compare.diagnosis.diagnose import diagnose
from compare.diagnosis.layer_case import comparable_sites
from compare.diagnosis.proof import MistakeProof, ProofOutcome, ProofWay, SiteProof, StageProof, not_provable
from compare.diagnosis.proving import fit_on_own_input
from compare.limits.criteria import Criteria
from compare.sides.golden_weights import GoldenWeights, WeightSource
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.graph import LayerGraph
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import LayerInputs
from minimax_tools.reference.expert_pass import LayerWeights
from minimax_tools.reference.right_stages import (
    cut_behind,
    readers_of,
    right_value,
    sites_behind,
    waves,
)
from minimax_tools.results.results import Comparison, SiteStatus
from neuron.devices.runtime import Runtime
from neuron.runs.device_request import DeviceRequest
from neuron.runs.layer_run import LayerRequest, LayerRun
from neuron.runs.runner import DeviceRun

# Share of ρ at the layer's output: an undone mistake that leaves less took a part of the error away.
_LESS = 0.7


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Judged:
    """A run of the layer, and its judgement."""

    capture: Capture
    comparison: Comparison

    @property
    def is_right(self) -> bool:
        """True if the layer passes, or only warns."""
        return self.comparison.verdict.exit_code == 0

    @property
    def blamed(self) -> frozenset[Site]:
        """The sites to blame."""
        return frozenset(Site(site) for blame in self.comparison.blame for site in blame.sites)

    @property
    def failing(self) -> tuple[Site, ...]:
        """The sites that fail, in execution order."""
        failing = (site for site in self.comparison.sites if site.status is SiteStatus.FAIL)
        return tuple(Site(site.site) for site in failing)

    def rho(self, site: Site) -> float | None:
        """Return ρ of a site; None if it has none, or it is not finite."""
        for result in self.comparison.sites:
            if result.site == site and result.noise is not None and math.isfinite(result.noise.whole):
                return result.noise.whole
        return None


class PortProver:
    """Proofs in one layer of a port.

    Args:
        request: The run of the layer as the port is: isolated, from a golden, all sites recorded, no token decoded.
        runtime: The open backend.
        reader: Reader of the checkpoint.
        weights: Source of the golden's weights, the same checkpoint.
        criteria: Limits that judge before and after.
        directory: Folder of the runs' captures.
    """

    def __init__(
        self,
        request: DeviceRequest,
        *,
        runtime: Runtime,
        reader: CheckpointReader,
        weights: WeightSource,
        criteria: Criteria,
        directory: Path,
    ) -> None:
        assert request.golden is not None, "a proof judges against a golden"
        self._request = request
        self._golden = request.golden
        self._layer = request.run.span.start
        self._runtime = runtime
        self._reader = reader
        self._weights = weights
        self._criteria = criteria
        self._directory = directory

    def prove(self, undone: tuple[Undo, ...]) -> MistakeProof:
        """Undo these mistakes together, and judge the layer again.

        They are undone in the weights, as far as a change of the tensors undoes them; if the layer is not right then,
        all of them where they are made.
        """
        return replace(self._prove(undone), target_digest=self._request.target.source_digest)

    def _prove(self, undone: tuple[Undo, ...]) -> MistakeProof:
        with self._weights.open_layer(self._layer, self._golden) as weights:
            right = LayerInputs.of(weights.spec, LayerWeights(weights.tensors), self._golden.read_inputs())
            hidden = [str(undo) for undo in undone if not undo.may_show(right)]
            if hidden:
                return not_provable(f"{' and '.join(hidden)} cannot show in this model on these tokens")
            before = self._run("before", self._request)
            if before.comparison.blame == () and not before.failing:
                return not_provable(
                    f"layer {self._layer} does not fail as it is: there is nothing to prove",
                    before=before.comparison.verdict,
                )
            graph = self._request.spec.graph
            in_weights = tuple(undo for undo in undone if undo.is_in_weights(graph))
            at_stages = tuple(undo for undo in undone if not undo.is_in_weights(graph))
            proofs = []
            if in_weights and self._request.target.reads_weights:
                proofs.append(self._attempt(before, weights, right, in_weights, at_stages))
            if not proofs or not proofs[0].is_proved:
                proofs.append(self._attempt(before, weights, right, (), undone))
        return min(proofs, key=lambda proof: list(ProofOutcome).index(proof.outcome))

    def _attempt(
        self,
        before: _Judged,
        weights: GoldenWeights,
        right: LayerInputs,
        in_weights: tuple[Undo, ...],
        at_stages: tuple[Undo, ...],
    ) -> MistakeProof:
        if not at_stages:
            after = self._run(_folder(in_weights), self._undone(in_weights))
            return self._conclude(before, after, in_weights)
        hypothesis = join_hypotheses(at_stages)
        known = comparable_sites(self._golden, before.capture, self._layer)
        replaceable = known - {Site.INPUT, Site.OUTPUT}
        cut = cut_behind(self._graph, hypothesis.sites, replaceable=replaceable)
        is_last = Site.OUTPUT in hypothesis.sites and set(self._graph.inputs[Site.OUTPUT]) <= known
        if Site.OUTPUT in cut and not is_last:
            return self._shows_too_little(before, hypothesis.sites - replaceable)
        fit = fit_on_own_input(
            self._golden,
            before.capture,
            weights=weights,
            layer=self._layer,
            hypothesis=join_hypotheses((*in_weights, *at_stages)),
            cut=cut,
        )
        if not fit.is_explained:
            return fit.refuted("the port", cut, before=before.comparison.verdict)
        while True:
            # Before the replaced sites the mistake still shows.
            mistaken = hypothesis.sites | sites_behind(self._graph, hypothesis.sites)
            hidden = mistaken - set(cut) - sites_behind(self._graph, cut)
            after = self._run(
                _folder((*in_weights, *at_stages)),
                replace(
                    self._undone(in_weights, hidden=hidden),
                    replaced=cut,
                    stage_feed=partial(_feed_right, sites=cut, known=known, right=right),
                ),
            )
            passed_over = self._passed_over(before, after, cut)
            if not passed_over:
                break
            cut = cut_behind(self._graph, {*cut, *passed_over}, replaceable=replaceable)
        own = [site for site in sites_behind(self._graph, cut) - set(cut) if site in known]
        if not own and not is_last:
            return not_provable(
                f"the port goes on with other values than it shows at {_word(cut[:1])}",
                "Point the port's `sites` at a submodule whose output it computes with.",
                before=before.comparison.verdict,
            )
        return self._conclude(before, after, in_weights, replaced=cut, stage=fit.stage)

    @property
    def _graph(self) -> LayerGraph:
        return self._golden.graph.layer(self._layer)

    def _undone(
        self, in_weights: tuple[Undo, ...], *, hidden: frozenset[Site] = frozenset()
    ) -> DeviceRequest:
        """Return the run with mistakes undone in the weights, without `hidden` sites, and those that this reorders."""
        reordered = {site for undo in in_weights for site in undo.mistake.reorders}
        run = self._request.run
        sites = tuple(site for site in run.sites if site not in reordered | hidden)
        edits = {str(undo): undo.edit for undo in in_weights}
        return replace(self._request, edits=edits, run=replace(run, sites=sites))

    def _run(self, name: str, request: DeviceRequest) -> _Judged:
        directory = self._directory / name
        DeviceRun(request, runtime=self._runtime, reader=self._reader).capture(directory)
        capture = Capture.open(directory)
        comparison = compare_captures(
            self._golden,
            capture,
            criteria=self._criteria,
            layer_pattern="layer_*",
            weights=self._weights,
        )
        return _Judged(capture=capture, comparison=comparison)

    def _passed_over(self, before: _Judged, after: _Judged, cut: tuple[Site, ...]) -> frozenset[Site]:
        """Return the sites behind the replaced ones that the port computes from something else than it shows there.

        They did not change, or they are to blame now and were not before: they do not follow from the right values.
        """
        readers = {
            reader
            for site in cut
            if not self._is_same(before, after, site)
            for reader in readers_of(self._graph, site)
            if reader not in cut and reader in after.capture.sites(self._layer)
        }
        return frozenset(
            reader
            for reader in readers
            if self._is_same(before, after, reader) or reader in after.blamed - before.blamed
        )

    def _is_same(self, before: _Judged, after: _Judged, site: Site) -> bool:
        return before.capture.read(self._layer, site).equal(after.capture.read(self._layer, site))

    def _shows_too_little(self, before: _Judged, missing: Collection[Site]) -> MistakeProof:
        names = _word(sorted(missing, key=lambda site: site.order))
        return not_provable(
            f"the port does not show {names}, nor all that is computed from it before the output",
            "Name the sites in the port's `sites`.",
            before=before.comparison.verdict,
        )

    def _conclude(
        self,
        before: _Judged,
        after: _Judged,
        in_weights: tuple[Undo, ...],
        *,
        replaced: tuple[Site, ...] = (),
        stage: StageProof | None = None,
    ) -> MistakeProof:
        """Compare the layer before and after; if it is still wrong, name what explains the rest."""
        way = ProofWay.WEIGHTS_AND_STAGE if in_weights and replaced else None
        way = way or (ProofWay.WEIGHTS if in_weights else ProofWay.STAGE)
        edit = tuple(line for undo in in_weights for line in undo.lines(self._request.spec.family))
        has_conversion = self._request.target.may_convert
        wrong = [site for site in after.failing if site in after.blamed] or after.failing
        proof = MistakeProof(
            outcome=ProofOutcome.PROVED if after.is_right else ProofOutcome.NOT_PROVED,
            way=way,
            before=before.comparison.verdict,
            after=after.comparison.verdict,
            sites=tuple(
                SiteProof(
                    site=result.site,
                    before=before.rho(Site(result.site)),
                    after=after.rho(Site(result.site)),
                    is_right=result.status is not SiteStatus.FAIL,
                    is_replaced=Site(result.site) in replaced,
                )
                for result in after.comparison.sites
                if result.status.is_compared
            ),
            edit=edit,
            lines=lines_for_layers(
                edit,
                (self._layer,),
                num_layers=self._request.spec.num_hidden_layers,
                has_conversion=has_conversion,
            )
            if edit
            else (),
            num_layers=self._request.spec.num_hidden_layers,
            has_conversion=has_conversion,
            stage=stage,
        )
        if proof.is_proved:
            return proof
        remaining = self._name_rest(after) if self._took_something_away(before, after) else ()
        return replace(proof, remaining=remaining, reason=f"{_word(wrong) or 'the layer'} is still wrong")

    def _took_something_away(self, before: _Judged, after: _Judged) -> bool:
        """Decide whether a part of the error went away: a site to blame is right now, or the output's ρ fell."""
        if before.blamed - after.blamed - set(after.failing):
            return True
        first, second = before.rho(Site.OUTPUT), after.rho(Site.OUTPUT)
        return first is not None and second is not None and second < _LESS * first

    def _name_rest(self, after: _Judged) -> tuple[str, ...]:
        """Name the mistakes that explain what is left, each as --undo takes it; of two together `a + b`."""
        found = diagnose(self._golden, after.capture, model=self._request.model_source, layers=(self._layer,))
        return tuple(
            " + ".join(map(str, undo_finding(finding.mistake, finding.parameters)))
            for finding in found.findings
        )


def _feed_right(
    request: LayerRequest,
    run: Callable[[LayerRequest], LayerRun],
    *,
    sites: tuple[Site, ...],
    known: frozenset[Site],
    right: LayerInputs,
) -> LayerRequest:
    """Return the request with the right values of `sites` at its border.

    `known` are the sites whose values the port shows in the right shape. The layer runs once for each group of sites
    that do not follow from each other: a later stage's inputs are what the port computes once the earlier are right.
    """
    asked = tuple(site for site in Site if site in known or site is Site.INPUT)
    border = dict(request.border)
    for wave in waves(right.graph, sites):
        shown = run(replace(request, sites=asked, border=border)).tensors
        border |= {site: right_value(right, site, shown) for site in wave}
    return replace(request, border=border)


def _folder(undone: Collection[Undo]) -> str:
    return "without_" + "_and_".join(undo.name for undo in undone)


def _word(sites: Collection[Site]) -> str:
    return ", ".join(map(str, sites))
