"""What a diagnosis found: mistakes that explain layers, what else was close, and what was left unexplained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compare.diagnosis.mistake import Mistake, Value
from minimax_tools.results import Blame


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A mistake, or several together, held against one layer.

    Args:
        layer: The layer.
        mistake: Its name; of several `a + b`.
        parameters: Its parameters; `rows` is `decode` where it is made in decoded rows alone. Of several mistakes each
            name begins with its mistake's, as in `rope_theta.theta`.
        explains: Share of the error's energy that it takes away.
        leaves: ρ that it leaves: about 1 is what BF16 leaves.
        amplitude: The port's error along the one that is predicted; near 1 where it is right.
        z: The amplitude in units of its own uncertainty.
        what: What the port does, in a sentence.
        look_at: What to look at in the port's code.
        sources: Public threads that report it.
        resembles: Mistakes that explain the layer as well: nothing in these captures tells them apart.
    """

    layer: int
    mistake: str
    parameters: Mapping[str, Value]
    explains: float
    leaves: float
    amplitude: float
    z: float
    what: str
    look_at: str
    sources: tuple[str, ...] = ()
    resembles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDiagnosis:
    """What was found of one layer.

    Args:
        layer: The layer.
        sites: The sites that judged.
        unexplained: ρ of the port against the layer without a mistake, at those sites.
        named: The mistakes that explain it, best first; those behind the first resemble it.
        nearest: What comes nearest where nothing explains it, best first.
        num_hypotheses: How many were tried.
        notes: What to know beside.
    """

    layer: int
    sites: tuple[str, ...]
    unexplained: float
    named: tuple[Finding, ...]
    nearest: tuple[Finding, ...]
    num_hypotheses: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A whole diagnosis.

    Args:
        reference: The golden's directory.
        target: The device run's directory.
        verdict_failed: Whether the comparison of the chosen layers fails.
        blame: Whom it blames.
        layers: What was found of each layer that was looked at, ascending.
        notes: What to know beside.
    """

    reference: str
    target: str
    verdict_failed: bool
    blame: tuple[Blame, ...]
    layers: tuple[LayerDiagnosis, ...]
    notes: tuple[str, ...] = ()
    mistakes: tuple[Mistake, ...] = field(default=(), repr=False)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The mistakes that were named: layers ascending, best first."""
        return tuple(finding for layer in self.layers for finding in layer.named)

    @property
    def exit_code(self) -> int:
        """1 where the port differs, named or not."""
        return int(self.verdict_failed or bool(self.findings))
