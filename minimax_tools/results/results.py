"""Results: what a comparison found, as values that add up; nothing here computes or prints."""

from __future__ import annotations

from dataclasses import dataclass

from minimax_tools.metrics.pair_metrics import PairMetrics
from minimax_tools.model.sites import Site
from minimax_tools.results.choices import LogitsResult, RoutingResult
from minimax_tools.text_enum import TextEnum


class Verdict(TextEnum):
    """Conclusion of a comparison."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    INCOMPARABLE = "incomparable"

    @property
    def exit_code(self) -> int:
        """0 for pass and warn, 1 for fail, 3 for incomparable."""
        return {Verdict.FAIL: 1, Verdict.INCOMPARABLE: 3}.get(self, 0)


class SiteStatus(TextEnum):
    """Status of one site; only the first three were compared."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    NOT_EXPOSED = "not exposed"  # by the port
    NOT_CAPTURED = "not captured"  # by the golden
    NOT_JUDGED = "not judged"  # the run stopped before it, or no token was left to judge

    @property
    def is_compared(self) -> bool:
        """True if both sides were there and were judged."""
        return self in (SiteStatus.PASS, SiteStatus.WARN, SiteStatus.FAIL)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRatio:
    """ρ = ‖target − float32‖ / ‖reference − float32‖ at one site; 1 is as good as the golden.

    Args:
        whole: Over all judged tokens and channels.
        ordinary: Without the massive channels.
        massive: Over the massive channels alone; None if there are none.
        token_median: Median over the tokens.
        token_p99: 99th percentile over the tokens.
        token_worst: The worst token's.
        worst_token: Its row and position.
        is_estimated: Whether the float32 twin was missing and ρ was estimated from ‖target − reference‖.
        incoming: Relative error of a chained layer's input, which widens the floor; 0 in isolated runs.
        floor: The floor that ρ is in units of, relative to the golden's values; None if they are all zero.
        interval: Where `whole` lies with 95 % confidence, from what it is without one prompt after the other;
            None if that cannot be told.
        token_gain, channel_gain, channel_offset: ρ of the error's averages, in which noise all but cancels: of the
            scale of each token, of the scale and of the mean error of each channel. None if no twin shows
            them, and in chained runs.
        channel_worst: The worst channel's, over all tokens; None as above.
        worst_channel: Its index.
        is_widened: Whether the golden's variants widen the floor.
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
    floor: float | None = None
    interval: tuple[float, float] | None = None
    token_gain: float | None = None
    channel_gain: float | None = None
    channel_offset: float | None = None
    channel_worst: float | None = None
    worst_channel: int | None = None
    is_widened: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeError:
    """‖target − reference‖ / ‖reference‖ over the judged tokens, if the golden kept no floor.

    Args:
        incoming: Relative error of a chained layer's input; 0 in isolated runs.
    """

    value: float
    incoming: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestLimit:
    """Figure of a site that comes nearest to its limit, or is furthest beyond it.

    Args:
        figure: Its name, a field of `NoiseRatio`, or `relative_l2`.
        limit: What right ports stay below.
    """

    figure: str
    value: float
    limit: float

    @property
    def excess(self) -> float:
        """The figure in units of its limit; above 1 it is broken."""
        return self.value / self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedRow:
    """Likeness of what both sides generated behind a prompt.

    Args:
        num_compared: Tokens that both sides generated.
        num_alike: Of them, those before the first that differs.
        status: Fail if noise does not explain that one; not judged if the golden does not tell.
        reason: Why, in a sentence.
        reference, target: The golden's token and the port's where they first differ.
        margin: How far the golden's logit of its own token is above that of the port's; at least so far, if the
            golden did not keep it. None if it kept none.
        reach: The margin that noise may turn round; None if it is not known.
    """

    row: int
    num_compared: int
    num_alike: int
    status: SiteStatus
    reason: str
    reference: int | None = None
    target: int | None = None
    margin: float | None = None
    reach: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteResult:
    """Result at one site of one layer (or of the model, if `layer` is None).

    Args:
        reason: Why, in a sentence; empty for a plain pass.
        metrics: The seeds' metrics and more; None if nothing was compared.
        noise: ρ; None without a floor.
        routing: Expert sets; on `router_experts` alone.
        relative: The error without a floor; None with one.
        nearest: What decided, or came nearest to deciding; None if no limit of noise was held against it.
        num_judged: Tokens that were judged by noise.
        logits: Next-token distributions; on `logits` alone.
        num_set_aside: Tokens left out of ρ because their experts are, or may be, others than the golden's.
        num_replayed: Tokens whose experts are others, judged against the golden with the port's own experts.
        classic_failures: The seeds' limits that it breaks, such as `cosine_similarity 0.93 < 0.99`.
        where: What its wrong tokens and channels have in common, in sentences; of sites to blame alone.
    """

    layer: int | None
    site: str
    status: SiteStatus
    reason: str = ""
    metrics: PairMetrics | None = None
    noise: NoiseRatio | None = None
    routing: RoutingResult | None = None
    relative: RelativeError | None = None
    nearest: NearestLimit | None = None
    num_judged: int = 0
    logits: LogitsResult | None = None
    num_set_aside: int = 0
    num_replayed: int = 0
    classic_failures: tuple[str, ...] = ()
    where: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """A site to blame: it fails though its inputs pass, or on the port's own values of them.

    Args:
        layer: The layer; None outside them.
        sites: The site, behind others that were not compared and may hold the fault as well.
        reason: Why.
    """

    layer: int | None
    sites: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlameGroup:
    """Layers in which the same sites are to blame.

    Args:
        layers: The layers, ascending; None is the model outside them.
        worst_layer: Where they are furthest beyond their limits.
        reason: What is said of that layer.
        where: What is said there of the tokens and channels that are wrong.
    """

    layers: tuple[int | None, ...]
    sites: tuple[str, ...]
    worst_layer: int | None
    reason: str
    where: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Error of a chained run after one layer.

    Args:
        error: ‖target − reference‖ / ‖reference‖ of its output.
        handed_on: The same of its input, the inherited error; 0 if that is the golden's own.
        floor: What its output may be off by: the noise of the layer and its input error, relative to the
            output; None if the golden kept no floor.
        ratio: ρ of its output, over the tokens that are judged there; if there is no floor, the share of the limit.
    """

    layer: int
    error: float
    handed_on: float
    floor: float | None
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Growth of a chained run's error.

    Args:
        points: Layer by layer, ascending.
        onset: The first layer that adds more than noise to its input error; None if none does.
        command: What to run to learn who is to blame there; empty without an onset.
    """

    points: tuple[CurvePoint, ...]
    onset: int | None
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterDtype:
    """A part of the router that the port holds in another dtype than the golden.

    Args:
        name: `router_gate` or `correction_bias`.
        consequence: What that does, in a sentence.
    """

    name: str
    reference: str
    target: str
    consequence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A whole comparison of two directories.

    Args:
        criteria: `noise`, `classic`, or the file that the limits came from.
        sites: Every site of every layer in the run's span, in natural order.
        blame: Sites to blame, earliest layer first.
        blame_groups: The same, layers with the same sites together.
        curve: Growth of a chained run's error; None for isolated runs.
        notes: What a reader must know beside the verdict.
        router_dtypes: Parts of the router that the port holds in another dtype.
        generated: What both sides generated, prompt by prompt.
        tokens: The real tokens of the batch, such as `81 at positions 0-47`; empty if no side tells.
    """

    reference: str
    target: str
    criteria: str
    verdict: Verdict
    sites: tuple[SiteResult, ...]
    blame: tuple[Blame, ...] = ()
    blame_groups: tuple[BlameGroup, ...] = ()
    curve: Curve | None = None
    notes: tuple[str, ...] = ()
    router_dtypes: tuple[RouterDtype, ...] = ()
    generated: tuple[GeneratedRow, ...] = ()
    tokens: str = ""

    @property
    def shows_outputs_only(self) -> bool:
        """True if of the layers nothing was judged but their output."""
        judged = {site.site for site in self.sites if site.layer is not None and site.status.is_compared}
        declared = {site.site for site in self.sites if site.layer is not None}
        return judged == {str(Site.OUTPUT)} != declared

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
        """Return the sites of one layer, or the model's for None."""
        return tuple(site for site in self.sites if site.layer == layer)
