"""Results: values that a comparison found, from a site's figures to the whole. Nothing here judges or prints.

Choices that a port makes otherwise than the golden: experts, and next tokens.

ModelFinding: something wrong in a whole port's run, with the pass and the layer at which it shows.

WrongRegion: the tokens or channels that hold the wrong values of a site, as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minimax_tools.capture.manifest import WeightFault
from minimax_tools.metrics.pair_metrics import PairMetrics
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.text_enum import TextEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A token that the port sends to other experts."""

    row: int  # the token's prompt
    position: int  # index of the token in its row, padding included
    dropped: tuple[int, ...]  # experts that the golden chose and the port did not
    # Experts that the port chose and the golden did not; none if the port names one twice.
    chosen: tuple[int, ...]
    # Difference of biased scores that noise must overcome to cause the flip; None without a floor.
    margin: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingResult:
    """Comparison of the chosen experts, token by token.

    A flip is explained if noise may reverse its margin. The margin is the distance between the k-th and the (k+1)-th
    score; if the weights are known, the distance between the experts that changed places.
    """

    num_tokens: int  # judged tokens
    num_flipped: int  # judged tokens with other experts
    num_explained: int  # flips that noise explains
    # The widest margin of an unexplained flip; None without a noise floor.
    widest_unexplained_margin: float | None
    worst_flips: tuple[Flip, ...] = ()  # some unexplained flips, the widest margin first

    @property
    def num_unexplained(self) -> int:
        """Flips that noise does not explain."""
        return self.num_flipped - self.num_explained


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """A place where the port's likeliest next token is not the golden's."""

    row: int  # the prompt
    position: int  # index of the token in its row, padding included
    reference: int  # the golden's likeliest token
    target: int  # the port's likeliest token
    margin: float  # the golden's logit of its own token minus its logit of the port's token
    reach: float  # the largest margin that noise may reverse


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsResult:
    """Comparison of the next-token distributions, token by token."""

    num_tokens: int  # judged tokens
    # KL(golden ‖ port) in nats over the tokens: mean, 95th percentile, worst.
    kl_mean: float
    kl_p95: float
    kl_worst: float
    worst_token: tuple[int, int]  # row, and index in it, of the token with `kl_worst`
    # `kl_mean` and `kl_p95` as noise of the floor's size alone would make them.
    kl_mean_foreseen: float
    kl_p95_foreseen: float
    # By k, the share of the golden's k likeliest tokens that are among the port's k likeliest.
    overlaps: Mapping[int, float]
    num_disagreeing: int  # tokens whose likeliest next token is another
    num_explained: int  # disagreements whose margin noise may reverse
    worst_choices: tuple[TokenChoice, ...] = ()  # some unexplained disagreements, the widest margin first
    # Whether the golden's head was given the port's own last layer: then no layer's error is in these figures.
    is_of_head: bool = False

    @property
    def num_unexplained(self) -> int:
        """Disagreements that noise does not explain."""
        return self.num_disagreeing - self.num_explained


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLogits:
    """Next-token distributions of a run or of one pass of it, against the golden's own."""

    # 0 for a whole port's prefill, t for its t-th step; None for all tokens of a run of layers.
    number: int | None
    num_tokens: int
    kl_mean: float  # Kullback-Leibler divergence in nats
    kl_worst: float
    worst_token: tuple[int, int]  # row and index of the token
    num_agreeing: int  # tokens whose likeliest next token is the golden's


_EMBEDDING = str(ModelSite.EMBEDDING)
# Behind every pass and every layer.
_LAST = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFinding:
    """A finding in a whole port's run."""

    # The pass: 0 for the prefill or the first chunk, t for the t-th decoding step or the chunk behind t others; None if
    # no pass is known
    number: int | None
    layer: int | None  # None outside the layers
    # Sites, or `cache`, `layer_order`, `chosen_token`, `repeated_run`, `padded_logits`, `generated_tokens`
    sites: tuple[str, ...]
    reason: str  # what differs, with figures
    mistake: str | None = None  # name of the known mistake that explains it; None if none does
    what: str = ""  # the mistake in a sentence
    look_at: str = ""  # the part of the port to look at
    parameters: Mapping[str, Any] = field(default_factory=dict)  # numbers or text, by name

    is_warning: bool = False  # whether it says that something was not judged, and not that it is wrong
    is_of_sites: bool = False  # whether sites of the comparison show it, which are blamed anyway
    # Operation that computes this site and that of another finding, if both are one cause; empty if not
    operation: str = ""

    # Whether the pass is one of several tokens behind a cache: these come after the prefill and its steps
    in_chunks: bool = False

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sort key: what came first in the run. The embedding is before the layers, all else behind them."""
        outside = -1 if _EMBEDDING in self.sites else _LAST
        place = outside if self.layer is None else self.layer
        return self.in_chunks, _LAST if self.number is None else self.number, place


# First and last number of a range, both included.
Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongRegion:
    """A region that holds all wrong tokens or channels of a site; empty lists narrow nothing down."""

    num_wrong: int  # wrong tokens or channels
    num_held: int  # tokens or channels that the region holds, wrong or right
    of: int  # judged tokens, or channels of the site
    rows: tuple[int, ...] = ()  # rows of the batch
    tokens: tuple[Range, ...] = ()  # tokens of a row, as ranges [first, last], both included
    every: int | None = None  # step between the wrong ones of these tokens; null if they are all
    positions: tuple[Range, ...] = ()  # positions of the tokens, as ranges [first, last], both included
    is_decoded: bool | None = (
        None  # whether the tokens were decoded one at a time; null if that tells nothing
    )
    experts: tuple[int, ...] = ()  # experts of which each wrong token uses one, or whose logits are wrong
    heads: tuple[int, ...] = ()  # heads
    dims: tuple[Range, ...] = ()  # dims of each head, as ranges [first, last], both included
    channels: tuple[Range, ...] = ()  # channels, as ranges [first, last], both included


# Stands for a site in a blame of weights.
WEIGHTS = "weights"
# Reason of a site that the port does not expose, if no other is known.
NOT_EXPOSED = "the port does not expose it"


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

    @property
    def is_passed(self) -> bool:
        """True for pass and warn."""
        return self.exit_code == 0

    @classmethod
    def of_exit_code(cls, exit_code: int) -> Verdict:
        """Return the verdict of a command that ended with an exit code: pass, fail, or else incomparable."""
        return {0: cls.PASS, 1: cls.FAIL}.get(exit_code, cls.INCOMPARABLE)


class SiteStatus(TextEnum):
    """Status of one site; only the first three are judgements."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    NOT_EXPOSED = "not exposed"  # by the port
    NOT_CAPTURED = "not captured"  # by the golden
    # The run stopped before it, no token was left, the criteria leave it out, or it failed with inputs that are not
    # known. Its figures may be there.
    NOT_JUDGED = "not judged"

    @property
    def is_compared(self) -> bool:
        """True if the site was judged: pass, warn or fail."""
        return self in (SiteStatus.PASS, SiteStatus.WARN, SiteStatus.FAIL)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRatio:
    """ρ = ‖target − float32‖ / ‖reference − float32‖ at one site; 1 is as good as the golden."""

    whole: float  # ρ over all judged tokens and channels
    ordinary: float  # without the massive channels
    massive: float | None  # over the massive channels alone; None if there are none
    token_median: float  # median over the tokens
    token_p99: float  # 99th percentile over the tokens
    token_worst: float  # ρ of the worst token
    worst_token: tuple[int, int]  # row, and index in it (padding included), of the worst token
    is_estimated: bool  # whether the float32 twin was missing and ρ was estimated from ‖target − reference‖
    incoming: float  # relative error of a chained layer's input, which widens the floor; 0 in isolated runs
    # The floor that ρ is in units of, relative to the golden's values; None if they are all zero.
    floor: float | None = None
    # 95 % interval of `whole`, by a jackknife over prompts or blocks of tokens; None if there are too few.
    interval: tuple[float, float] | None = None
    # Three ρ of averages of the error, in which noise almost cancels: of each token's scale, each channel's scale, and
    # each channel's mean error. None without a float32 twin, and in chained runs.
    token_gain: float | None = None
    channel_gain: float | None = None
    channel_offset: float | None = None
    channel_worst: float | None = None  # ρ of the worst channel, over all tokens; None in the same cases
    worst_channel: int | None = None  # index of the worst channel
    # Whether the golden's variants (other correct BF16 computations of the layer) widen the floor.
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
    """Comparison of the tokens that both sides generated after a prompt."""

    row: int  # the prompt
    num_compared: int  # number of tokens that both sides generated
    num_alike: int  # number of tokens before the first that differs
    # `fail` if noise does not explain the first difference; `not judged` if the golden does not tell, drew its tokens,
    # or no token was compared.
    status: SiteStatus
    reason: str  # sentence that explains the status; empty for a plain pass
    reference: int | None = None  # the golden's token where they first differ
    target: int | None = None  # the port's token there
    # The golden's logit of its own token minus its logit of the port's token. A lower bound if the golden did not
    # keep its logit of the port's token; None if it kept no logits.
    margin: float | None = None
    reach: float | None = None  # the largest margin that noise may reverse; None if it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteResult:
    """Result at one site of one layer (or of the model, if `layer` is None)."""

    layer: int | None
    site: str
    status: SiteStatus
    reason: str = ""  # sentence that explains the status; empty for a plain pass
    # Classic metrics, such as cosine similarity, golden against port, also of sites that are not judged; None if they
    # were not measured.
    metrics: PairMetrics | None = None
    # The same against the golden's layer computed on the port's own input; None unless the layer is judged by that.
    own_input_metrics: PairMetrics | None = None
    noise: NoiseRatio | None = None  # ρ; None without a floor
    routing: RoutingResult | None = None  # comparison of the chosen experts; only at `router_experts`
    relative: RelativeError | None = None  # the relative error, if there is no floor; else None
    # The figure that broke its limit most, or came nearest to it; None if no limit of noise applies.
    nearest: NearestLimit | None = None
    num_judged: int = 0  # tokens that were judged by noise
    logits: LogitsResult | None = None  # comparison of the next-token distributions; only at `logits`
    # Tokens left out of ρ because the port's experts are, or may be, others than the golden's.
    num_set_aside: int = 0
    # Tokens with other experts, judged by replay: against the golden with the port's experts.
    num_replayed: int = 0
    # Limits of classic metrics that are broken, such as `cosine_similarity 0.93 < 0.99`.
    classic_failures: tuple[str, ...] = ()
    # Sentences on what the wrong tokens and channels have in common; only of sites to blame.
    where: tuple[str, ...] = ()
    regions: tuple[WrongRegion, ...] = ()  # the tokens and channels that `where` names, as numbers
    # Row and token of each wrong token; only of sites to blame, if the others are right and these are few
    wrong_tokens: tuple[tuple[int, int], ...] = ()

    @property
    def judged_metrics(self) -> PairMetrics | None:
        """The metrics against the values that the site is judged by."""
        return self.metrics if self.own_input_metrics is None else self.own_input_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """A site to blame: it fails though its inputs pass, or though it is recomputed from the port's own inputs."""

    layer: int | None  # the layer; None outside the layers
    # The site, and before it those that were not compared and may hold the fault as well.
    sites: tuple[str, ...]
    reason: str  # sentence that explains the blame
    # Sites that the blamed ones are computed from, and that are right: the mistake lies behind them. () if none is
    # known to be, or the site was recomputed from the port's own values.
    right: tuple[str, ...] = ()
    # Operation that computes this site and another blamed one of the layer, if both are one cause; empty if not.
    operation: str = ""
    is_of_weights: bool = False  # whether wrong weights, which were seen when they were loaded, explain it
    # Whether it is wrong in a whole port's chunks alone, and right in prefill and steps
    in_chunks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlameGroup:
    """A cause: layers in which the same sites are to blame."""

    layers: tuple[int | None, ...]  # the layers, ascending; None is the model outside them
    sites: tuple[str, ...]
    worst_layer: int | None  # the layer in which the sites are furthest beyond their limits
    reason: str  # `Blame.reason` of the worst layer; of two sites of one operation both, with their names
    where: tuple[str, ...] = ()  # `SiteResult.where` of the worst layer
    regions: tuple[WrongRegion, ...] = ()  # `SiteResult.regions` of the worst layer
    operation: str = ""  # operation that computes all `sites`, which are one cause; empty for a single site


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Error of a chained run after one layer."""

    layer: int
    error: float  # ‖target − reference‖ / ‖reference‖ of the layer's output
    # The same ratio of the layer's input: the inherited error; 0 if the input is the golden's own.
    handed_on: float
    # Error that the layer's noise and its input error cause, relative to the output; None without a noise floor.
    floor: float | None
    # ρ of the output over the judged tokens; if there is no floor, the error in units of its limit.
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Growth of a chained run's error."""

    points: tuple[CurvePoint, ...]  # layer by layer, ascending
    onset: int | None  # the first layer that adds more than noise to its input error; None if no layer does
    command: str  # command that tells which site is to blame in that layer; empty without an onset


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterDtype:
    """A part of the router that the port holds in another dtype than the golden."""

    name: str  # `router_gate` or `correction_bias`
    reference: str  # name of the golden's dtype
    target: str  # name of the port's dtype
    consequence: str  # sentence on what the other dtype does


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsResult:
    """Comparison of a layer's weights with the checkpoint, by kind (`q_proj`, `w1`), as they were loaded."""

    layer: int
    compared: tuple[str, ...]  # kinds of which it holds every number of the checkpoint
    not_compared: tuple[str, ...]
    reason: str  # why those were not compared; empty without any
    wrong: tuple[WeightFault, ...]
    noted: tuple[WeightFault, ...]  # what a port may do on purpose
    explains: tuple[str, ...]  # sites that read wrong weights, and need no other cause
    is_divided: bool = False  # whether some kind is held by several ranks together, and by none alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Untested:
    """A place where a port may be wrong, and that a comparison has not looked at."""

    what: str  # `sites`, `experts`, `long_rows`, `decode`, … (see `compare.untested`)
    detail: str  # what was left out, in words
    by: str = ""  # what tests it, in short; empty if nothing of mm2 does
    command: str = ""  # the whole command; empty if it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedRun:
    """A whole port's run in chunks: passes of several tokens, each behind what the ones before have cached."""

    widths: tuple[int, ...] = ()  # tokens of the longest prompt in each pass; () if there were no chunks
    untested: str = ""  # why they were not run, or not judged; empty if they were
    compared: int = 0  # number of sites that were judged
    of: int = 0  # number of sites, judged or not


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A whole comparison of two directories."""

    reference: str  # folder or address of the golden
    target: str  # folder or address of the run
    criteria: str  # `noise`, `classic`, or the file that the limits came from
    verdict: Verdict
    # Each site that the run declares to compute (`Run.computed_sites`) of each compared layer, layers ascending; then
    # those outside the layers.
    sites: tuple[SiteResult, ...]
    blame: tuple[Blame, ...] = ()  # sites to blame, earliest layer first
    blame_groups: tuple[BlameGroup, ...] = ()  # the sites to blame, with layers of the same sites together
    curve: Curve | None = None  # growth of a chained run's error; None for isolated runs
    notes: tuple[str, ...] = ()  # what a reader must know beside the verdict
    router_dtypes: tuple[RouterDtype, ...] = ()  # parts of the router that the port holds in another dtype
    # Weights of the layers whose weights were compared when they were loaded
    weights: tuple[WeightsResult, ...] = ()
    # What is wrong in a whole port's run, what came first at the front
    findings: tuple[ModelFinding, ...] = ()
    pass_logits: tuple[PassLogits, ...] = ()  # next tokens of a whole port by pass, which judge nothing
    # The same prompts in chunks, whose findings are among `findings`; None for runs that are no whole port's
    chunks: ChunkedRun | None = None
    untested: tuple[Untested, ...] = ()  # what was not looked at, whatever the verdict
    generated: tuple[GeneratedRow, ...] = ()  # what both sides generated, prompt by prompt
    # The real tokens and their position ids, such as `81 at positions 0-47`; empty if no side tells.
    tokens: str = ""
    port: str = ""  # what made the run, such as `port.py:DecoderLayer` or `builtin`; empty if it does not say

    @property
    def shows_outputs_only(self) -> bool:
        """True if only the outputs of the layers were judged, though the run declares other sites."""
        judged = {site.site for site in self.sites if site.layer is not None and site.status.is_compared}
        declared = {site.site for site in self.sites if site.layer is not None}
        outputs = {str(Site.OUTPUT)}
        return judged == outputs and declared != outputs

    @property
    def shows_logits_only(self) -> bool:
        """True if nothing but the logits was judged, though the run declares layers."""
        judged = {site.site for site in self.sites if site.status.is_compared}
        return judged == {str(ModelSite.LOGITS)} and bool(self.layers)

    @property
    def compared(self) -> int:
        """Number of sites, counted in each layer, that were judged."""
        return sum(site.status.is_compared for site in self.sites)

    @property
    def of(self) -> int:
        """Number of sites, counted in each layer, judged or not."""
        return len(self.sites)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of the comparison, ascending."""
        return tuple(sorted({site.layer for site in self.sites if site.layer is not None}))

    def of_layer(self, layer: int | None) -> tuple[SiteResult, ...]:
        """Return the sites of one layer, or the model's for None."""
        return tuple(site for site in self.sites if site.layer == layer)
