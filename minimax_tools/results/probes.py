"""Probes: what the runs of a bisection, or of a search by replaced streams, found; nothing here computes or prints.

A probe is one run over a part of the layers, in chains: each begins with the golden's input and is judged at its end.
The stream is the hidden states from layer to layer. A point is the input of a layer, by the layer's number; the number
of layers stands for the input of the final norm, None for no replacement. Each point begins a part of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minimax_tools.json_codec import decode, encode
from minimax_tools.model.span import Span
from minimax_tools.results.results import Verdict

Point = int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedRun:
    """A run with the stream replaced at one point, and the judgement of its logits."""

    point: Point
    is_right: bool
    excess: float  # the largest error of the logits in units of its limit; infinite if they are not finite
    reason: str = ""  # what differs; empty if the run is right


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSearch:
    """A search for the last wrong part of a model, finished or waiting for a run."""

    num_layers: int
    reference: str  # folder or address of the golden
    target: str  # the port as the user named it; empty if it was run by hand
    runs: tuple[ReplacedRun, ...]  # the runs that were judged, in order
    is_finished: bool
    waits_for: Point = None  # point of the run that is needed next, of an unfinished search
    finding: ReplacedRun | None = (
        None  # the run whose point begins the wrong part; None if all parts are right
    )
    # Points of all parts that may be the wrong one, the finding's first: more than one if the error grows slowly from
    # run to run. Empty without a finding.
    suspects: tuple[Point, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """`fail` if a part is wrong, `incomparable` while a run is missing."""
        if not self.is_finished:
            return Verdict.INCOMPARABLE
        return Verdict.PASS if self.finding is None else Verdict.FAIL

    @property
    def num_parts(self) -> int:
        """Number of parts of the model: its layers, one behind them, and one before them."""
        return self.num_layers + 2

    @property
    def num_judged(self) -> int:
        """Number of parts that are known to be right, and the wrong one."""
        known = [
            count_parts_behind(run.point, num_layers=self.num_layers) for run in self.runs if run.is_right
        ]
        if self.finding is not None:
            known.append(count_parts_behind(self.finding.point, num_layers=self.num_layers))
        return max(known, default=0)


def count_parts_behind(point: Point, *, num_layers: int) -> int:
    """Return the number of parts of a model behind a point."""
    return num_layers + 2 if point is None else num_layers - point + 1


def name_part(point: Point, *, num_layers: int) -> str:
    """Name the part of the model that a point begins."""
    if point is None:
        return "what comes before layer 0: tokens, positions, embedding"
    return "the final norm or the head" if point == num_layers else f"layer {point}"


def part_layer(point: Point, *, num_layers: int) -> int | None:
    """Return the layer that a point begins; None if the part lies before or behind the layers."""
    return None if point == num_layers else point


def name_point(point: Point, *, num_layers: int) -> str:
    """Name the point at which a run's stream is replaced."""
    if point is None:
        return "nowhere"
    return "final norm's input" if point == num_layers else f"layer {point}'s input"


# In units of a chain's limit. Limits were measured on some models, and right ports drift more in others: a chain only
# a little beyond its limit, though each of its layers is right alone, proves nothing.
_PROOF_EXCESS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Layers that ran one after the other, and the judgement of the last one's output."""

    span: Span
    is_right: bool  # whether the output is within its limits
    excess: float  # the output's error in units of the limit; above 1 it is wrong
    # The least noise that would surely make the chain wrong, whatever the port's own noise: noise added to every token
    # of the output, relative to the norm of the token's ordinary channels (all but the massive ones).
    visible: float
    reason: str = ""  # why the output is wrong; empty if it is right

    def to_json(self) -> dict[str, Any]:
        """Return the chain as a bisection's journal holds it: figures as text, because they may be infinite."""
        return {
            "start_layer": self.span.start,
            "stop_layer": self.span.stop,
            "is_right": self.is_right,
            "excess": str(self.excess),
            "visible": str(self.visible),
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Chain:
        """Return the chain of a journal."""
        return cls(
            span=_read_span(record),
            is_right=decode(bool, record["is_right"]),
            excess=float(decode(str, record["excess"])),
            visible=float(decode(str, record["visible"])),
            reason=decode(str, record["reason"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A run over a part of the layers; it ends with the first chain that is wrong."""

    span: Span  # the layers asked for
    chains: tuple[Chain, ...]  # the chains that ran, ascending

    def __post_init__(self) -> None:
        starts = [self.span.start, *(chain.span.stop for chain in self.chains)]
        if [chain.span.start for chain in self.chains] != starts[:-1]:
            raise ValueError(f"the chains of {self.span} do not follow each other")
        if any(not chain.is_right for chain in self.chains[:-1]):
            raise ValueError(f"the probe of {self.span} went on behind a chain that is wrong")
        if self.first_wrong is None and starts[-1] != self.span.stop:
            raise ValueError(f"the chains of {self.span} do not cover it")

    @property
    def first_wrong(self) -> Chain | None:
        """The first chain that is wrong; all before it are right."""
        return next((chain for chain in self.chains if not chain.is_right), None)

    @property
    def worst(self) -> Chain:
        """The chain with the most error in units of its limit."""
        return max(self.chains, key=lambda chain: chain.excess)

    def to_json(self) -> dict[str, Any]:
        """Return the probe as a journal holds it."""
        return {"start_layer": self.span.start, "stop_layer": self.span.stop, "chains": encode(self.chains)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Probe:
        """Return the probe of a journal."""
        return cls(
            span=_read_span(record),
            chains=decode(tuple[Chain, ...], record["chains"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectionFinding:
    """Finding of a search: a layer that is wrong alone, or layers that are wrong only in a chain."""

    chain: Chain  # the shortest chain that is wrong; of one layer if that is the culprit

    @property
    def is_culprit(self) -> bool:
        """True if one layer, run alone, is wrong."""
        return len(self.chain.span) == 1

    @property
    def is_proof(self) -> bool:
        """True if the port is wrong beyond doubt: in one layer, or in a chain far beyond its limit."""
        return self.is_culprit or self.chain.excess > _PROOF_EXCESS


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """A finished search over layers."""

    span: Span  # the layers that were searched
    reference: str  # folder or address of the golden
    target: str  # the port as the user named it
    arguments: tuple[str, ...]  # what a command needs to run the same port on the same golden
    probes: tuple[Probe, ...]  # the runs of the search, in order
    findings: tuple[BisectionFinding, ...]  # wrong layers and wrong chains, ascending
    num_resumed: int = 0  # number of probes that an earlier, interrupted bisection had run
    # The least noise in the experts' sum, relative to the output, that a sweep of the layers one by one would
    # surely see; None if the golden does not tell.
    sweep_visible: float | None = None

    @property
    def verdict(self) -> Verdict:
        """`fail` if a finding is a proof; `warn` if a chain is a little beyond its limit."""
        if any(finding.is_proof for finding in self.findings):
            return Verdict.FAIL
        return Verdict.WARN if self.findings else Verdict.PASS

    @property
    def culprits(self) -> tuple[BisectionFinding, ...]:
        """Layers that are wrong alone."""
        return tuple(finding for finding in self.findings if finding.is_culprit)

    @property
    def drifts(self) -> tuple[BisectionFinding, ...]:
        """Chains that are wrong though each of their layers, run alone, is right."""
        return tuple(finding for finding in self.findings if not finding.is_culprit)

    @property
    def compared(self) -> int:
        """Number of layers whose own output was judged."""
        return len({chain.span.last for probe in self.probes for chain in probe.chains})

    @property
    def of(self) -> int:
        """Number of layers of the search."""
        return len(self.span)

    @property
    def covered(self) -> frozenset[int]:
        """Layers that ran in a chain whose end was judged."""
        return frozenset(layer for probe in self.probes for chain in probe.chains for layer in chain.span)

    @property
    def longest_chain(self) -> int:
        """Number of layers in the longest chain that ran."""
        return max((len(chain.span) for chain in self._chains()), default=0)

    @property
    def chained_visible(self) -> float | None:
        """Least noise (`Chain.visible`) that is seen behind any chain of several layers; None if none ran."""
        return max((chain.visible for chain in self._chains() if len(chain.span) > 1), default=None)

    @property
    def single_visible(self) -> float | None:
        """Least noise (`Chain.visible`) that is seen behind any layer that ran alone; None if none ran."""
        return max((chain.visible for chain in self._chains() if len(chain.span) == 1), default=None)

    def _chains(self) -> tuple[Chain, ...]:
        return tuple(chain for probe in self.probes for chain in probe.chains)


def _read_span(record: Mapping[str, Any]) -> Span:
    return decode(Span, {"start": record["start_layer"], "stop": record["stop_layer"]})
