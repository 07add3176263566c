"""Proving: a proof for each named mistake of a diagnosis, by a process of `mm2-test`, or from what a dump shows.

What a dump gives at the mistake's stage must be what the mistake gives on the dump's own inputs; all else must be
right. `compare` knows nothing of ports: it starts the command, and reads what this prints.
"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from compare.catalogue.mistake import Hypothesis
from compare.catalogue.undo import Undo, join_hypotheses, undo_finding
from compare.comparer import compare_captures
from compare.diagnosis.diagnose import OpenProgress
from compare.diagnosis.finding import Diagnosis, LayerDiagnosis, MistakeFinding, SiteDiagnosis
from compare.diagnosis.layer_case import LayerCase, comparable_sites
from compare.diagnosis.proof import (
    MistakeProof,
    ProofOutcome,
    ProofWay,
    SiteProof,
    StageProof,
    not_provable,
)
from compare.diagnosis.score import FAINT_RHO, Score, is_explanation, most_left
from compare.diagnosis.trial import Trial
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.golden_weights import CheckpointWeights, GoldenWeights, WeightSource
from minimax_tools.capture.run_commands import RunCommands
from minimax_tools.capture.source import CaptureSource
from minimax_tools.json_codec import decode, finite_or_none
from minimax_tools.machine.json_file import parse_json
from minimax_tools.machine.progress import NoProgress
from minimax_tools.machine.stops import run_child
from minimax_tools.model.graph import LayerGraph
from minimax_tools.model.run import Mode
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.reference.right_stages import cut_behind, sites_behind
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus, Verdict

_RUN_PORT = "Run the port on this golden with mm2-test, and prove it there."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnInputFit:
    """Fit of a mistake to what a stage gave."""

    score: Score
    is_explained: bool  # whether the stage gave what the mistake gives
    is_factor: bool = False  # whether a factor on the stage's right values explains what it gave as well

    @property
    def stage(self) -> StageProof:
        """The fit as a proof tells it."""
        return StageProof.of(leaves=self.score.leaves, unexplained=self.score.unexplained)

    def refuted(self, side: str, cut: tuple[Site, ...], *, before: Verdict) -> MistakeProof:
        """Return the proof of a mistake that does not explain what `side`, with this verdict, gave at `cut`."""
        fault = "is not what the mistake gives on its own inputs"
        if self.is_factor:
            fault = "is the right value times a factor as much as it is the mistake"
        return MistakeProof(
            outcome=ProofOutcome.NOT_PROVED,
            reason=f"what {side} gives at {', '.join(map(str, cut))} {fault}",
            before=before,
            stage=self.stage,
        )


def fit_on_own_input(
    reference: CaptureSource,
    target: CaptureSource,
    *,
    weights: GoldenWeights,
    layer: int,
    hypothesis: Hypothesis,
    cut: tuple[Site, ...],
) -> OwnInputFit:
    """Fit a hypothesis to what the port gave at the `cut` sites, computed from what it shows before the mistake.

    The golden (`reference`) and the run hold the layer's input and output. A mistake that the noise covers is fitted on
    the golden's values too, if the port's input is the golden's: they share its roundings.
    """
    comparable = comparable_sites(reference, target, layer)
    judging = cut
    if Site.ROUTER_WEIGHTS in cut and Site.ROUTER_EXPERTS not in comparable:
        # Weights in any order say nothing: what the experts add up to does.
        shown = Site.MOE_DELTA if Site.MOE_DELTA in comparable else Site.OUTPUT
        judging = tuple(dict.fromkeys(shown if site is Site.ROUTER_WEIGHTS else site for site in cut))
    graph = reference.graph.layer(layer)
    begins = hypothesis.change.sites_in(graph)
    own = comparable - begins - sites_behind(graph, begins)
    with torch.no_grad():
        trial = _open_trial(reference, target, weights, layer, judging=judging, own=own | {Site.INPUT})
        fit = _fit(trial, hypothesis, trial.judge([hypothesis])[:1])
        if fit.is_explained or fit.score.unexplained > FAINT_RHO or not _is_isolated(target):
            return fit
        trial = _open_trial(reference, target, weights, layer, judging=judging, own=frozenset())
        faint = _fit(trial, hypothesis, trial.judge_faint([hypothesis]))
        return faint if faint.is_explained else fit


def _fit(trial: Trial, hypothesis: Hypothesis, scores: Sequence[Score]) -> OwnInputFit:
    """Return the fit of the first score that explains the stage better than a factor does, or else of the first."""
    score = next(filter(is_explanation, scores), scores[0])
    is_factor = (
        is_explanation(score)
        and not hypothesis.is_factor
        and not score.is_better_than(trial.factor_misfits())
    )
    return OwnInputFit(score=score, is_explained=is_explanation(score) and not is_factor, is_factor=is_factor)


def rho_on_own_input(
    reference: CaptureSource, target: CaptureSource, *, weights: GoldenWeights, layer: int, site: Site
) -> float:
    """Return ρ of a site against the right layer, computed from what the port shows before it."""
    behind = sites_behind(reference.graph.layer(layer), [site])
    own = comparable_sites(reference, target, layer) - {site} - behind
    with torch.no_grad():
        trial = _open_trial(reference, target, weights, layer, judging=(site,), own=own | {Site.INPUT})
        return trial.null().unexplained


def _open_trial(
    reference: CaptureSource,
    target: CaptureSource,
    weights: GoldenWeights,
    layer: int,
    *,
    judging: tuple[Site, ...],
    own: frozenset[Site],
) -> Trial:
    case = LayerCase(
        reference,
        target,
        weights=weights,
        layer=layer,
        suspects=frozenset(),
        judging=judging,
        own=own,
    )
    return case.open_trial()


def _is_isolated(target: CaptureSource) -> bool:
    description = target.known_description
    return description is not None and description.run.mode is Mode.ISOLATED


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecomputedProofs:
    """Proofs from the sites of a dump."""

    golden: CaptureSource
    dump: CaptureSource
    comparison: Comparison  # the judgement of the dump
    weights: WeightSource

    def prove(self, layer: int, undone: tuple[Undo, ...]) -> MistakeProof:
        """Prove mistakes in a layer from what the dump shows of it."""
        hypothesis = join_hypotheses(undone)
        shown = comparable_sites(self.golden, self.dump, layer)
        graph = self.golden.graph.layer(layer)
        cut = cut_behind(graph, hypothesis.sites, replaceable=shown - {Site.OUTPUT})
        missing = _missing(graph, hypothesis.sites, cut, shown)
        if missing:
            return not_provable(
                "there is no port to run, and the dump does not show "
                f"{', '.join(map(str, missing))} of layer {layer}",
                _RUN_PORT,
            )
        with self.weights.open_layer(layer, self.golden) as weights:
            fit = fit_on_own_input(
                self.golden, self.dump, weights=weights, layer=layer, hypothesis=hypothesis, cut=cut
            )
            if not fit.is_explained:
                return fit.refuted("the dump", cut, before=self.comparison.verdict)
            mistaken = {*hypothesis.sites, *cut}
            sites = tuple(
                self._judge_site(result, layer, weights, fit.score)
                for result in self.comparison.of_layer(layer)
                if Site(result.site) not in mistaken and result.status.is_compared
            )
        wrong = [site.site for site in sites if not site.is_right]
        return MistakeProof(
            outcome=ProofOutcome.NOT_PROVED if wrong else ProofOutcome.PROVED,
            reason=f"{', '.join(wrong)} is wrong too" if wrong else "",
            way=ProofWay.RECOMPUTED,
            before=self.comparison.verdict,
            sites=sites,
            stage=fit.stage,
        )

    def _judge_site(self, result: SiteResult, layer: int, weights: GoldenWeights, stage: Score) -> SiteProof:
        """Judge another site by what the dump shows before it; chosen experts by the comparison alone."""
        site = Site(result.site)
        is_blamed = any(
            blame.layer == layer and result.site in blame.sites for blame in self.comparison.blame
        )
        before = result.noise.whole if result.noise else None
        if result.status is not SiteStatus.FAIL or is_blamed or result.noise is None:
            return SiteProof(site=result.site, before=before, after=before, is_right=not is_blamed)
        after = rho_on_own_input(self.golden, self.dump, weights=weights, layer=layer, site=site)
        return SiteProof(
            site=result.site,
            before=before,
            after=finite_or_none(after),
            is_right=after <= most_left(stage.unexplained),
        )


def _missing(
    graph: LayerGraph, sites: Collection[Site], cut: tuple[Site, ...], shown: Collection[Site]
) -> tuple[Site, ...]:
    """Return the sites that a proof needs and the dump lacks: the layer's input, the stages, and one that follows."""
    if Site.OUTPUT in cut:
        needed = {*sites, *graph.inputs[Site.OUTPUT]}
    else:
        needed = {Site.INPUT} if sites_behind(graph, cut) & set(shown) else {Site.INPUT, Site.OUTPUT}
    return tuple(sorted(needed - set(shown), key=lambda site: site.order))


@dataclass(frozen=True, slots=True, kw_only=True)
class PortProcess:
    """The port of a run, to be run again as it was: on the same backend, with as many ranks, from the same golden."""

    commands: RunCommands  # of the run that was diagnosed

    @classmethod
    def of(
        cls, golden: CaptureSource, run: CaptureSource, *, model: str, target: str | None
    ) -> PortProcess | None:
        """Return the process of a run's port; None if the run is another tool's dump, which names no port."""
        commands = RunCommands.of(golden, run, model=model, target=target)
        if commands is None or commands.port is None:
            return None
        # Its folder, where the files are at hand.
        return cls(commands=replace(commands, golden=str(golden.directory)))

    def prove(self, layer: int, undone: tuple[Undo, ...]) -> MistakeProof:
        """Undo mistakes in a layer, and judge it again; a port that does not run proves nothing."""
        assert self.commands.port is not None, "a port is run again"
        # A run on the native backend compiles unless told not to.
        mode = str(self.commands.port.provenance.options.get("compile", "off"))
        options = [word for undo in undone for word in ("--undo", str(undo))]
        with tempfile.TemporaryDirectory(prefix="mm2-proof-") as folder:
            options += ("--output-dir", folder, "--json", "--quiet", "--compile", mode)
            done = run_child(shlex.split(self.commands.single_layer(layer, *options)))
        try:
            return decode(MistakeProof, parse_json(done.stdout)["proof"])
        except (ValueError, LookupError, TypeError):
            return not_provable(f"the port did not run: {_find_error(done)}", "Give its place with --target.")


def _find_error(done: subprocess.CompletedProcess[str]) -> str:
    try:
        return str(parse_json(done.stdout)["error"]).rstrip(".")
    except (ValueError, LookupError, TypeError):
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"it ended with exit code {done.returncode}"


def prove_diagnosis(
    diagnosis: Diagnosis,
    reference: CaptureSource,
    target: CaptureSource,
    *,
    model: str,
    port: str | None = None,
    open_progress: OpenProgress = lambda _: nullcontext(NoProgress()),
) -> Diagnosis:
    """Return the diagnosis with a proof for each named mistake, in each of its layers.

    Args:
        diagnosis: The diagnosis of these two captures.
        reference: The golden, a capture of mm2's own.
        target: The device run. Its port is run again in processes of its own; a dump must prove by what it shows.
        model: Folder or hub id of the checkpoint.
        port: The port as --target names it; None for the run's own.
        open_progress: Opens the progress that receives the layer of each proof.

    Raises:
        CannotRunError: A dump, or the checkpoint, cannot be read.
    """
    num_proofs = sum(len(layer.named) for layer in diagnosis.layers)
    if not diagnosis.findings:
        return diagnosis
    prover = _find_prover(reference, target, model=model, port=port)
    layers = []
    with open_progress(num_proofs) as progress:
        for layer in diagnosis.layers:
            named = []
            for finding in layer.named:
                named.append(replace(finding, proof=_prove_finding(prover, layer, finding)))
                progress.advance(layer.layer, num_bytes=0)
            layers.append(replace(layer, named=tuple(named)))
    sites = tuple(
        replace(
            site,
            named=tuple(replace(found, proof=_prove_outside(site, found, diagnosis)) for found in site.named),
        )
        for site in diagnosis.sites
    )
    return replace(diagnosis, layers=tuple(layers), sites=sites)


def _find_prover(
    reference: CaptureSource, target: CaptureSource, *, model: str, port: str | None
) -> PortProcess | RecomputedProofs:
    process = PortProcess.of(reference, target, model=model, target=port)
    if process is not None:
        return process
    weights = CheckpointWeights(model=model)
    comparison = compare_captures(
        reference,
        target,
        criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
        layer_pattern="layer_*",
        weights=weights,
    )
    return RecomputedProofs(golden=reference, dump=target, comparison=comparison, weights=weights)


def _prove_finding(
    prover: PortProcess | RecomputedProofs, layer: LayerDiagnosis, finding: MistakeFinding
) -> MistakeProof:
    parameters = dict(finding.parameters)
    if parameters.pop("rows", None) is not None:
        return not_provable(
            "only decoded tokens are wrong, and the layer is run again on all tokens at once",
            "Mend it, and run mm2-test single-layer --decode again.",
        )
    undone = undo_finding(finding.mistake, parameters)
    if any(undo.may_lie_before(layer.sites) for undo in undone):
        return not_provable(
            "the scaled sum itself is not shown, and what it is made of may be wrong instead",
            "Show the sum and the sites before it, and run it again.",
        )
    return prover.prove(layer.layer, undone)


def _prove_outside(site: SiteDiagnosis, finding: MistakeFinding, diagnosis: Diagnosis) -> MistakeProof:
    """Prove a mistake outside the layers from the run's own values: there mm2 runs no code of a port."""
    behind = [
        other.site
        for other in diagnosis.sites
        if site.site is ModelSite.FINAL_NORM and other.site is ModelSite.LOGITS and not other.is_right
    ]
    stage = StageProof(leaves=finding.leaves, unexplained=site.unexplained)
    if behind:
        return MistakeProof(outcome=ProofOutcome.NOT_PROVED, reason=f"{behind[0]} is wrong too", stage=stage)
    return MistakeProof(outcome=ProofOutcome.PROVED, way=ProofWay.RECOMPUTED, stage=stage)
