"""Proving: a proof for each named mistake of a diagnosis, by a process of `mm2-test` or from what a dump shows.

`compare` knows nothing of ports: it starts the command, and reads what this prints.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from compare.catalogue.undo import Undo, undo_finding
from compare.comparer import compare_captures
from compare.diagnosis.finding import Diagnosis, LayerDiagnosis, MistakeFinding, SiteDiagnosis
from compare.diagnosis.proof.proof import MistakeProof, ProofOutcome, ProofWay, StageProof, not_provable
from compare.diagnosis.proof.recomputed import RecomputedProofs
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.capture.manifest import Description
from minimax_tools.capture.source import CaptureSource
from minimax_tools.json_codec import decode
from minimax_tools.machine.json_file import parse_json
from minimax_tools.machine.progress import NoProgress, Progress
from minimax_tools.model.sites import ModelSite

_MODULE = "neuron"  # the package of `mm2-test`


@dataclass(frozen=True, slots=True, kw_only=True)
class PortProcess:
    """The port of a run, to be run again as it was: on the same backend, with as many ranks, from the same golden."""

    golden: str  # folder of the golden
    model: str  # folder or hub id of the checkpoint
    target: str  # the port, as --target names it
    run: Description  # description of the run that was diagnosed

    @classmethod
    def of(
        cls, golden: CaptureSource, run: CaptureSource, *, model: str, target: str | None
    ) -> PortProcess | None:
        """Return the process of a run's port; None if the run is another tool's dump, which names no port."""
        description = run.known_description
        if description is None:
            return None
        return cls(
            golden=str(golden.directory),
            model=model,
            target=target or description.provenance.target,
            run=description,
        )

    def prove(self, layer: int, undone: tuple[Undo, ...]) -> MistakeProof:
        """Undo mistakes in a layer, and judge it again; a port that does not run proves nothing."""
        with tempfile.TemporaryDirectory(prefix="mm2-proof-") as folder:
            done = subprocess.run(
                [sys.executable, "-m", _MODULE, *self._arguments(layer, undone, folder)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        try:
            return decode(MistakeProof, parse_json(done.stdout)["proof"])
        except (ValueError, LookupError, TypeError):
            return not_provable(f"the port did not run: {_find_error(done)}", "Give its place with --target.")

    def _arguments(self, layer: int, undone: tuple[Undo, ...], folder: str) -> Iterator[str]:
        provenance = self.run.provenance
        yield from ("single-layer", "--layer", str(layer), "--model", self.model, "--golden", self.golden)
        yield from ("--target", self.target, "--backend", provenance.backend)
        yield from ("--dtype", provenance.dtypes["weights"], "--output-dir", folder, "--json", "--quiet")
        # A run on the native backend compiles unless told not to.
        yield from ("--compile", str(provenance.options.get("compile", "off")))
        for option in ("tp_degree", "ep_degree", "reduce_dtype"):
            if option in provenance.options:
                yield from (f"--{option.replace('_', '-')}", str(provenance.options[option]))
        for undo in undone:
            yield from ("--undo", str(undo))


def _find_error(done: subprocess.CompletedProcess[str]) -> str:
    try:
        return str(parse_json(done.stdout)["error"]).rstrip(".")
    except (ValueError, LookupError, TypeError):
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"it ended with exit code {done.returncode}"


# From the number of proofs to the context of their progress.
OpenProgress = Callable[[int], AbstractContextManager[Progress]]


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
    proved = replace(diagnosis, layers=tuple(layers), sites=sites)
    return replace(proved, notes=(*diagnosis.notes, *_source_notes(proved, target)))


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
            "the layer's output alone is shown, and what the scaled sum is made of may be wrong instead",
            "Show the sites before it, and run it again.",
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


def _source_notes(diagnosis: Diagnosis, target: CaptureSource) -> tuple[str, ...]:
    description = target.known_description
    if description is None or not description.provenance.target_digest:
        return ()
    found = {finding.proof.target_digest for finding in diagnosis.findings if finding.proof} - {""}
    if found <= {description.provenance.target_digest}:
        return ()
    return (
        f"the source of {description.provenance.target} has changed since the run: the proofs are of what it is now",
    )
