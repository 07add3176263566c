"""Results: what a comparison found, as values that add up; nothing here computes or prints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from minimax_tools.metrics import PairMetrics


class Verdict(str, Enum):
    """What a comparison concludes."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    INCOMPARABLE = "incomparable"

    def __str__(self) -> str:
        return self.value

    @property
    def exit_code(self) -> int:
        """0 for pass and warn, 1 for fail, 3 for incomparable."""
        return {Verdict.FAIL: 1, Verdict.INCOMPARABLE: 3}.get(self, 0)


class SiteStatus(str, Enum):
    """What became of one site; only the first three were compared."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    NOT_EXPOSED = "not exposed"  # by the port
    NOT_CAPTURED = "not captured"  # by the golden
    NOT_JUDGED = "not judged"  # the run stopped before it, or no token was left to judge

    def __str__(self) -> str:
        return self.value

    @property
    def is_compared(self) -> bool:
        """Whether both sides were there and were judged."""
        return self in (SiteStatus.PASS, SiteStatus.WARN, SiteStatus.FAIL)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRatio:
    """ρ = ‖target − float32‖ / ‖reference − float32‖ at one site; 1 is as good as the golden.

    Args:
        whole: Over all judged tokens and channels.
        ordinary: Without the massive channels.
        massive: Over the massive channels alone; None where there are none.
        token_median: Median over the tokens.
        token_p99: 99th percentile over the tokens.
        token_worst: The worst token's.
        worst_token: Its row and position.
        is_estimated: Whether the float32 twin was missing and ρ was estimated from ‖target − reference‖.
        incoming: Error that a chained layer was handed, relative to its input; it widens the floor. 0 in
            isolated runs.
    """

    whole: float
    ordinary: float
    massive: float | None
    token_median: float
    token_p99: float
    token_worst: float
    worst_token: tuple[int, int]
    is_estimated: bool
    incoming: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A token that the port sends to other experts.

    Args:
        row, position: Its place in the batch.
        dropped: Experts that the golden chose and the port did not.
        chosen: Experts that the port chose and the golden did not; none where it names one twice.
        margin: What noise must overcome, in biased scores; None without a floor.
    """

    row: int
    position: int
    dropped: tuple[int, ...]
    chosen: tuple[int, ...]
    margin: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingResult:
    """Expert sets, token by token.

    A flip is explained where noise may turn its margin round: the distance between the k-th and the (k+1)-th score,
    or, where the weights are known, between the experts that changed places.

    Args:
        num_tokens: Judged tokens.
        num_flipped: Of them, those with other experts.
        num_explained: Of these, those that the noise explains.
        widest_unexplained_margin: The widest margin of the others; None without a floor.
        worst_flips: Some of the others, the widest margin first.
    """

    num_tokens: int
    num_flipped: int
    num_explained: int
    widest_unexplained_margin: float | None
    worst_flips: tuple[Flip, ...] = ()

    @property
    def num_unexplained(self) -> int:
        """Flips that noise does not explain."""
        return self.num_flipped - self.num_explained


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteResult:
    """One site of one layer (or of the model, where `layer` is None).

    Args:
        layer: The layer.
        site: The site's name.
        status: What became of it.
        reason: Why, in a sentence; empty for a plain pass.
        metrics: The seeds' metrics and more; None where nothing was compared.
        noise: ρ; None without a floor.
        routing: Expert sets; on `router_experts` alone.
        num_set_aside: Tokens left out of ρ because their experts are, or may be, others than the golden's.
        num_replayed: Tokens whose experts are others, judged against the golden with the port's own experts.
        classic_failures: The seeds' limits that it breaks, such as `cosine_similarity 0.93 < 0.99`.
    """

    layer: int | None
    site: str
    status: SiteStatus
    reason: str = ""
    metrics: PairMetrics | None = None
    noise: NoiseRatio | None = None
    routing: RoutingResult | None = None
    num_set_aside: int = 0
    num_replayed: int = 0
    classic_failures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """A site to blame: it fails, and all it is computed from passes."""

    layer: int | None
    sites: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterDtype:
    """A part of the router that the port holds in another dtype than the golden.

    Args:
        name: `router_gate` or `correction_bias`.
        reference: The golden's dtype.
        target: The port's.
        consequence: What that does, in a sentence.
    """

    name: str
    reference: str
    target: str
    consequence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A whole comparison.

    Args:
        reference: The golden's directory.
        target: The device run's directory.
        criteria: `noise` or `classic`.
        verdict: The conclusion.
        sites: Every site of every layer in the run's span, in natural order.
        blame: Who is to blame, earliest layer first.
        notes: What a reader must know beside the verdict.
        router_dtypes: Parts of the router that the port holds in another dtype.
    """

    reference: str
    target: str
    criteria: str
    verdict: Verdict
    sites: tuple[SiteResult, ...]
    blame: tuple[Blame, ...] = ()
    notes: tuple[str, ...] = ()
    router_dtypes: tuple[RouterDtype, ...] = ()

    @property
    def compared(self) -> int:
        """Layer-site pairs that were judged."""
        return sum(site.status.is_compared for site in self.sites)

    @property
    def of(self) -> int:
        """Layer-site pairs within the run's declared span."""
        return len(self.sites)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of the comparison, ascending."""
        return tuple(sorted({site.layer for site in self.sites if site.layer is not None}))

    def of_layer(self, layer: int | None) -> tuple[SiteResult, ...]:
        """The sites of one layer, or the model's for None."""
        return tuple(site for site in self.sites if site.layer == layer)
