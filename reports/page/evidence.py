"""Report: a comparison, with what both captures show beside its figures, as plain numbers; and a diagnosis in words.

Those who hold the captures collect it (`compare/evidence/`); the page draws it. A token is named by its row in the
batch and its position in the row, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minimax_tools.results.results import Comparison
from reports.page.origins import OriginRow


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedMistake:
    """A known mistake that was tried on a place, and what it leaves of the error."""

    name: str
    parameters: str  # such as `theta 10000`; empty without any
    is_named: bool  # whether it explains the error; if not, it came nearest, which is a hint and no cause
    leaves: str  # ρ that is left with the mistake in the float32 layer
    explains: str  # percentage of the error's energy that it takes away
    fit: str = ""  # sentence on how well it explains the error
    what: str
    look_at: str
    layers: str = ""  # layers of the place that it was tried on; empty for all
    sources: tuple[str, ...] = ()  # public threads that report it
    proof: tuple[str, ...] = ()  # sentences on undoing it in the port; () if that was not asked for
    outcomes: tuple[str, ...] = ()  # outcomes of undoing it, such as `proved`; of several layers each once
    edits: tuple[str, ...] = ()  # lines that undo it in the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedPlace:
    """Layers that share a finding, or sites outside the layers."""

    place: str  # such as `layers 0-3`
    outcome: str  # such as `no known mistake explains them`, with ρ
    is_right: bool
    # Sentences on where the mistake lies, if nothing names it, and on the layers that are like these.
    lies: tuple[str, ...] = ()
    mistakes: tuple[TriedMistake, ...] = ()  # those that explain it, or came nearest: what leaves least first
    method: str = ""  # number of hypotheses that were tried, and what judged them
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedRun:
    """A whole diagnosis."""

    headline: str  # the verdict and the first wrong place, with its mistake
    places: tuple[DiagnosedPlace, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorHistogram:
    """Number of elements by the size of their error, in bins of equal width of log10."""

    edges: tuple[float, ...]  # ascending sizes of an error, one more than there are bins
    port: tuple[int, ...]  # elements in each bin: the port's error
    golden: tuple[int, ...]  # the same of the golden's error; empty without a float32 twin
    num_equal: int  # elements of the port without any error
    num_equal_golden: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPicture:
    """Error of a site by token and by channel, averaged over blocks of both.

    Every value is a root mean square over its block, in units of the golden's own error over all elements. Without a
    float32 twin, or where the golden rounds nothing, it is in units of the golden's values.
    """

    unit: str  # `the noise`, or `the golden's values`
    token_starts: tuple[int, ...]  # index of each block's first judged token, and the number of tokens
    token_names: tuple[str, ...]  # each block's tokens in words, such as `row 0, token 17`
    channel_starts: tuple[int, ...]  # index of each block's first channel, and the number of channels
    blocks: tuple[tuple[float, ...], ...]  # by block of tokens, then by block of channels
    by_token: tuple[float, ...]  # over all channels
    by_channel: tuple[float, ...]  # over all tokens
    massive: tuple[int, ...] = ()  # the massive channels


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstElement:
    """Element with a large error."""

    row: int
    position: int
    place: str  # the channel in words: its head too, if the site has heads
    golden: float
    port: float
    twin: float | None  # None if the golden keeps no float32 twin
    error: float  # port − twin, or port − golden without a twin


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteErrors:
    """Errors of one site, over the tokens that were judged."""

    layer: int | None  # None outside the layers
    site: str
    why: str  # reason to look at it, such as `to blame`
    num_tokens: int
    num_channels: int
    has_twin: bool  # whether errors are against the float32 twin; if not, against the golden
    histogram: ErrorHistogram
    picture: ErrorPicture
    worst: tuple[WorstElement, ...]  # the largest error first


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipPoint:
    """Token with other experts, and the distance of scores that noise must overcome."""

    row: int
    position: int
    margin: float
    is_explained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRouting:
    """Experts that both sides chose in one layer."""

    layer: int
    golden_load: tuple[int, ...]  # tokens by expert
    port_load: tuple[int, ...]
    # Whether the layer's input carries errors of other layers: its flips are then not its own alone
    is_inherited: bool = False
    reach: float | None = None  # the largest margin that noise may turn round; None without a floor
    flips: tuple[FlipPoint, ...] = ()  # the widest margin first


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChance:
    """Candidate for the next token, with its probability."""

    token: int
    text: str  # empty without a tokenizer
    probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """Likeliest next tokens of both sides after one token."""

    row: int
    position: int
    divergence: float  # in nats
    golden: tuple[TokenChance, ...]  # the likeliest first
    port: tuple[TokenChance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsEvidence:
    """Next-token distributions of both sides; one value for each judged token."""

    rows: tuple[int, ...]
    positions: tuple[int, ...]
    divergence: tuple[float, ...]  # KL(golden ‖ port) in nats
    foreseen: tuple[float, ...]  # the divergence that noise foretells
    top: tuple[TopTokens, ...] = ()  # the largest divergence first


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that both captures show beside the figures; empty if nobody collected it."""

    sites: tuple[SiteErrors, ...] = ()
    routing: tuple[LayerRouting, ...] = ()
    logits: LogitsEvidence | None = None
    notes: tuple[str, ...] = ()  # what could not be collected, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The contents of a report."""

    comparison: Comparison
    next_commands: tuple[str, ...] = ()  # what to run next, each a complete line
    evidence: Evidence = field(default_factory=Evidence)
    diagnosis: DiagnosedRun | None = None  # None if none was made
    diagnosis_text: str = ""  # the same as text
    origins: tuple[OriginRow, ...] = ()
