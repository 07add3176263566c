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
        whole: ρ over all judged tokens and channels.
        ordinary: Without the massive channels.
        massive: Over the massive channels alone; None if there are none.
        token_median: Median over the tokens.
        token_p99: 99th percentile over the tokens.
        token_worst: ρ of the worst token.
        worst_token: Row and position of the worst token.
        is_estimated: Whether the float32 twin was missing and ρ was estimated from ‖target − reference‖.
        incoming: Relative error of a chained layer's input, which widens the floor; 0 in isolated runs.
        floor: The floor that ρ is in units of, relative to the golden's values; None if they are all zero.
        interval: 95 % interval of `whole`, by a jackknife over prompts or blocks of tokens; None if there are too few.
        token_gain, channel_gain, channel_offset: ρ of the error's averages, in which noise almost cancels: of each
            token's scale, each channel's scale, and each channel's mean error. None without a twin, and in
            chained runs.
        channel_worst: ρ of the worst channel, over all tokens; None in the same cases.
        worst_channel: Index of the worst channel.
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
    """‖target − reference‖ / ‖reference‖ over the judged tokens; used if the golden kept no floor."""

    value: float
    incoming: float  # relative error of a chained layer's input; 0 in isolated runs


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestLimit:
    """Figure of a site that comes nearest to its limit, or is furthest beyond it."""

    figure: str  # its name, a field of `NoiseRatio`, or `relative_l2`
    value: float
    limit: float  # what right ports stay below

    @property
    def excess(self) -> float:
        """The figure in units of its limit; above 1 it is broken."""
        return self.value / self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedRow:
    """Comparison of the tokens that both sides generated after a prompt.

    Args:
        row: The prompt.
        num_compared: Number of tokens that both sides generated.
        num_alike: Number of tokens before the first that differs.
        status: `fail` if noise does not explain the first difference; `not judged` if the golden does not tell.
        reason: Sentence that explains the status.
        reference, target: The golden's token and the port's where they first differ.
        margin: The golden's logit of its own token minus its logit of the port's token; a lower bound if the golden
            did not keep the latter, None if it kept none.
        reach: The largest margin that noise may reverse; None if it is not known.
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
        reason: Sentence that explains the status; empty for a plain pass.
        metrics: Classic metrics, such as cosine similarity; None if nothing was compared.
        noise: ρ; None without a floor.
        routing: Comparison of the chosen experts; only at `router_experts`.
        relative: The relative error, if there is no floor; else None.
        nearest: The figure that decided, or came nearest to it; None if no limit of noise applies.
        num_judged: Tokens that were judged by noise.
        logits: Comparison of the next-token distributions; only at `logits`.
        num_set_aside: Tokens left out of ρ because the port's experts are, or may be, others than the golden's.
        num_replayed: Tokens with other experts, judged by replay: against the golden with the port's experts.
        classic_failures: Limits of classic metrics that are broken, such as `cosine_similarity 0.93 < 0.99`.
        where: Sentences on what the wrong tokens and channels have in common; only of sites to blame.
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
    """A site to blame: it fails though its inputs pass, or it still fails when recomputed from the port's own inputs.

    Args:
        layer: The layer; None outside the layers.
        sites: The site, and before it those that were not compared and may hold the fault as well.
        reason: Sentence that explains the blame.
    """

    layer: int | None
    sites: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlameGroup:
    """Layers in which the same sites are to blame."""

    layers: tuple[int | None, ...]  # the layers, ascending; None is the model outside them
    sites: tuple[str, ...]
    worst_layer: int | None  # the layer in which the sites are furthest beyond their limits
    reason: str  # `Blame.reason` of the worst layer
    where: tuple[str, ...] = ()  # `SiteResult.where` of the worst layer


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Error of a chained run after one layer.

    Args:
        error: ‖target − reference‖ / ‖reference‖ of the layer's output.
        handed_on: The same of the layer's input, the inherited error; 0 if the input is the golden's own.
        floor: Error that the layer's noise and its input error cause, relative to the output; None if the golden
            kept no floor.
        ratio: ρ of the output over the judged tokens; if there is no floor, the error in units of its limit.
    """

    layer: int
    error: float
    handed_on: float
    floor: float | None
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Growth of a chained run's error."""

    points: tuple[CurvePoint, ...]  # layer by layer, ascending
    onset: int | None  # the first layer that adds more than noise to its input error; None if no layer does
    command: str  # command that tells which site is to blame in that layer; empty without an onset


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterDtype:
    """A part of the router that the port holds in another dtype than the golden.

    Args:
        name: `router_gate` or `correction_bias`.
        reference, target: Names of the golden's dtype and of the port's.
        consequence: Sentence on what the other dtype does.
    """

    name: str
    reference: str
    target: str
    consequence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A whole comparison of two directories.

    Args:
        reference, target: The two directories.
        criteria: `noise`, `classic`, or the file that the limits came from.
        sites: Every site of every layer in the run's span, in natural order.
        blame: Sites to blame, earliest layer first.
        blame_groups: The sites to blame, with layers of the same sites together.
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
        """True if only the outputs of the layers were judged, though they have other sites."""
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
