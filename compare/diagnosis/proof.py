"""MistakeProof: what became of a port when a named mistake was undone in it; the same in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minimax_tools.json_codec import finite_or_none
from minimax_tools.results.results import Verdict
from minimax_tools.text_enum import TextEnum
from reports.wording import word_figure


class ProofOutcome(TextEnum):
    """Outcome of a proof."""

    PROVED = "proved"  # without the mistake the port is right
    NOT_PROVED = "not proved"  # something is still wrong, or the mistake is another one
    NOT_PROVABLE = "not provable"  # the mistake cannot be undone here

    @property
    def exit_code(self) -> int:
        """0 if it is proved, 1 if not, 3 if it could not be tried."""
        return {ProofOutcome.PROVED: 0, ProofOutcome.NOT_PROVED: 1}.get(self, 3)


class ProofWay(TextEnum):
    """Place at which the mistake was undone."""

    WEIGHTS = "weights"  # in the layer's tensors, before the port converted them
    STAGE = "stage"  # in what a stage gave while the port ran
    WEIGHTS_AND_STAGE = "weights and stage"  # of two mistakes one each
    RECOMPUTED = "recomputed"  # without the port: all that a dump shows was computed from its own values


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteProof:
    """Error of a site with the mistake, and without it; ρ is None where it was not measured."""

    site: str
    before: float | None  # ρ of the port as it is
    after: float | None  # ρ with the mistake undone
    is_right: bool  # whether the site passes, or only warns, with the mistake undone
    is_replaced: bool = False  # whether the right values were put here: then `after` says nothing of the port


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProof:
    """Values that a stage gave, on the port's own inputs of it; ρ is None where it is not finite."""

    leaves: float | None  # ρ against the mistake
    unexplained: float | None  # ρ against the right stage

    @classmethod
    def of(cls, *, leaves: float, unexplained: float) -> StageProof:
        """Build it from figures that need not be finite."""
        return cls(leaves=finite_or_none(leaves), unexplained=finite_or_none(unexplained))


@dataclass(frozen=True, slots=True, kw_only=True)
class MistakeProof:
    """Outcome of undoing a mistake in one layer."""

    outcome: ProofOutcome
    reason: str = ""  # sentence on why it is not proved, or not provable
    next_step: str = ""  # advice, if it is not proved
    way: ProofWay | None = None  # None if nothing was undone
    before: Verdict | None = None  # verdict on the layer as it is
    after: Verdict | None = None  # verdict with the mistake undone; None if it was not run
    sites: tuple[SiteProof, ...] = ()  # the sites that were judged, in execution order
    stage: StageProof | None = None  # None if the mistake was undone in the weights alone
    edit: tuple[str, ...] = ()  # lines that change this layer's tensors, if it was undone in the weights
    lines: tuple[str, ...] = ()  # the same as `convert_state_dict` needs them, for this layer alone
    num_layers: int = 0  # number of the model's layers, for which `lines` may be the same; 0 without lines
    has_conversion: bool = True  # whether the port has a convert_state_dict
    remaining: tuple[str, ...] = ()  # mistakes that explain what is left, as --undo takes them, best first
    target_digest: str = ""  # digest of the port's source that ran; empty if none did

    @property
    def is_proved(self) -> bool:
        """True if the port is right without the mistake."""
        return self.outcome is ProofOutcome.PROVED

    @property
    def worst(self) -> SiteProof | None:
        """The site that was the furthest off, of those that were not replaced; None if none has a figure."""
        measured = [site for site in self.sites if not site.is_replaced and site.before is not None]
        return max(measured, key=lambda site: site.before or 0.0, default=None)


def not_provable(reason: str, next_step: str = "", *, before: Verdict | None = None) -> MistakeProof:
    """Return the proof of a mistake that cannot be undone."""
    return MistakeProof(outcome=ProofOutcome.NOT_PROVABLE, reason=reason, next_step=next_step, before=before)


MEND_FIRST = "Mend the port first, then run it again."
PROVE_THE_PLACE = (
    "They prove the place. The fault is where conversion and forward disagree: if the weights are right "
    "(mm2-test weights), mend the forward instead."
)


def word_proof(proof: MistakeProof) -> Iterator[str]:
    """Yield sentences on a proof."""
    if proof.outcome is ProofOutcome.NOT_PROVABLE:
        yield f"Not provable here: {proof.reason}. {proof.next_step}".rstrip()
        return
    is_proved = "Proved" if proof.is_proved else "Not proved"
    if proof.way is None:
        yield f"{is_proved}: {proof.reason}{_word_stage(proof)}."
        return
    where = {
        ProofWay.WEIGHTS: "with the weights changed before the port converts them",
        ProofWay.STAGE: f"with the right values at {_word_replaced(proof)}",
        ProofWay.WEIGHTS_AND_STAGE: f"with the weights changed, and the right values at {_word_replaced(proof)}",
        ProofWay.RECOMPUTED: "recomputed from the run's own values",
    }[proof.way]
    figures = _word_figures(proof)
    if proof.is_proved:
        subject = "all else" if proof.way is ProofWay.RECOMPUTED else "the port's layer"
        yield f"{is_proved}: {where}, {subject} is right{figures}{_word_stage(proof)}."
        return
    yield f"{is_proved}: {where}, {proof.reason}{figures}."
    if proof.remaining:
        named = proof.remaining[0]
        yield f"What is left matches {named.split(',')[0]}: --undo {named}."


def word_lines_place(*, has_conversion: bool) -> str:
    """Return the words over lines to paste."""
    place = "at the beginning of convert_state_dict" if has_conversion else "in the port's class"
    return f"Lines that undo it, {place}:"


def _word_replaced(proof: MistakeProof) -> str:
    return ", ".join(site.site for site in proof.sites if site.is_replaced)


def _word_figures(proof: MistakeProof) -> str:
    """Word ρ before and after, at the worst site and at the output, of those that hold the port's own values."""
    own = {site.site: site for site in proof.sites if not site.is_replaced}
    chosen = [proof.worst, own.get("output")]
    words = [
        _word_site(site) for site in dict.fromkeys(chosen) if site is not None and site.before is not None
    ]
    return f" ({'; '.join(words)})" if words else ""


def _word_site(site: SiteProof) -> str:
    return f"{site.site} ρ {word_figure(site.before)} → {word_figure(site.after)}"


def _word_stage(proof: MistakeProof) -> str:
    if proof.stage is None:
        return ""
    leaves, before = word_figure(proof.stage.leaves), word_figure(proof.stage.unexplained)
    return f"; the mistake leaves ρ {leaves} of {before} of what the stage gave"
