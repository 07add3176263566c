"""Floor statistics: the error of BF16 in the golden at each site, token by token.

Names in a layer's floor file, float32 [B,S] with zeros on padding unless said otherwise:

| name | value |
|---|---|
| `<site>.error` | L2 norm over a token's channels of the BF16 value minus the float32 twin |
| `<site>.error_ordinary`, `<site>.error_massive` | the same over ordinary and over massive channels |
| `router_margin` | distance between the k-th and the (k+1)-th biased score in float32 |
| `router_noise` | largest error of BF16 in the scores nearest to the k-th |
| `<variant>/<name>` | the same for a variant instead of the golden |
| `<variant>/<site>.structure` | float32 [4], the variant's averages over the golden's (`Structure.figures`) |

A variant is another correct way to compute the layer in BF16, with the golden's choice of experts. A biased score is
an expert's score plus its correction bias: the k experts with the highest are chosen. Of a softmax without a bias it is
the expert's logit, which chooses alike.
`Structure` holds averages in which rounding cancels and a systematic mistake (a scale, an offset, a channel) does not.
Shapes: B prompts, S positions, T tokens that are no padding, F channels of a site, E experts, k experts for each token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from minimax_tools.metrics.error_sums import ErrorSums, square_by_channel, sum_errors
from minimax_tools.model.router import Router
from minimax_tools.model.sites import ModelSite, Site

# Least divisor: keeps a channel of zeros from dividing by zero.
_TINY = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Averages of the port's error, each divided by the same average of the golden's; 1 is as good as the golden."""

    token_gain: float  # L2 norm of the tokens' gains Σ error · exact / Σ exact², over ordinary channels
    channel_gain: float  # L2 norm of the gains of the channels, each over all tokens
    channel_offset: float  # L2 norm of the errors of the channels, each summed over all tokens
    channel_worst: float  # L2 error of the worst channel over all tokens
    worst_channel: int  # index of the worst channel

    def divided(self, divisors: Sequence[float]) -> Structure:
        """Return the structure with each of its `figures` divided by its own divisor, such as a variant's figure."""
        names = ("token_gain", "channel_gain", "channel_offset", "channel_worst")
        figures = zip(names, self.figures, divisors, strict=True)
        changes: dict[str, Any] = {name: value / divisor for name, value, divisor in figures}
        return replace(self, **changes)

    @property
    def figures(self) -> tuple[float, float, float, float]:
        """Gains of tokens and of channels, offset of channels, and error of the worst channel."""
        return self.token_gain, self.channel_gain, self.channel_offset, self.channel_worst


def measure_structure(
    twin: torch.Tensor, reference: torch.Tensor, target: torch.Tensor, *, massive: torch.Tensor
) -> Structure | None:
    """Measure the structure of a port's error; None if the golden has no error to compare with.

    Args:
        twin: float32 [T,F], values of the float32 twin, taken as exact.
        reference: Golden's values, any float dtype, [T,F].
        target: Port's values, any float dtype, [T,F].
        massive: bool [F], true on massive channels; in a token's gain they would hide the others.
    """
    return compare_sums(*sum_errors(reference, target, exact=twin, massive=massive))


def compare_sums(golden: ErrorSums, port: ErrorSums) -> Structure | None:
    """Return the structure of a port's error from the sums of both sides' errors; None if the golden has no error."""
    golden_squares = golden.channel_squares
    # Not `<= 0`: the sum may be NaN.
    if not float(golden_squares.sum()) > 0.0:
        return None
    # A channel with less noise than the median channel is compared with the median channel.
    least_squares = max(float(golden_squares.median()), _TINY)
    ratios = port.channel_squares / golden_squares.clamp(min=least_squares)
    worst = int(ratios.argmax())
    return Structure(
        token_gain=_ratio(_token_gains(port), _token_gains(golden)),
        channel_gain=_ratio(_channel_gains(port), _channel_gains(golden)),
        channel_offset=_ratio(port.channel_offsets, golden.channel_offsets),
        channel_worst=math.sqrt(float(ratios[worst])),
        worst_channel=worst,
    )


def _token_gains(sums: ErrorSums) -> torch.Tensor:
    return sums.products / sums.exact_squares.clamp(min=_TINY)


def _channel_gains(sums: ErrorSums) -> torch.Tensor:
    return sums.channel_products / sums.channel_exact_squares.clamp(min=_TINY)


def _ratio(port: torch.Tensor, golden: torch.Tensor) -> float:
    """Return the L2 norm of the port's averages over that of the golden's; 1 if both are 0."""
    numerator, denominator = float(port.norm()), float(golden.norm())
    if denominator == 0.0:
        return 1.0 if numerator == 0.0 else math.inf
    return numerator / denominator


# A channel is massive if its RMS over the tokens is more than this many times the median channel's.
MASSIVE_RATIO = 20.0
ROUTER_MARGIN = "router_margin"
ROUTER_NOISE = "router_noise"
# Number of scores on each side of the boundary between chosen and other experts that BF16 may carry across it.
_NUM_COMPETITORS = 4


def error_name(site: Site | ModelSite) -> str:
    """Return the name of a site's error norms over all channels."""
    return f"{site}.error"


def ordinary_error_name(site: Site | ModelSite) -> str:
    """Return the name of a site's error norms over ordinary channels."""
    return f"{site}.error_ordinary"


def massive_error_name(site: Site | ModelSite) -> str:
    """Return the name of a site's error norms over massive channels."""
    return f"{site}.error_massive"


def structure_name(site: Site) -> str:
    """Return the name of a variant's error structure at a site."""
    return f"{site}.structure"


def variant_name(variant: str, name: str) -> str:
    """Return the name of a variant's statistic."""
    return f"{variant}/{name}"


def token_rows(tensor: torch.Tensor, site: Site | ModelSite) -> torch.Tensor:
    """Reshape a site's tensor to one row for each token, [B,S,F]; heads with a dim of their own go side by side."""
    if site.has_heads_dim:
        tensor = tensor.transpose(1, 2)
    return tensor.reshape(*tensor.shape[:2], -1)


def massive_channels(rows: torch.Tensor) -> torch.Tensor:
    """Find the massive channels of rows [T,F]: bool [F]."""
    rms = square_by_channel(rows).div(rows.shape[0]).sqrt().float()
    return rms > MASSIVE_RATIO * rms.median()


def floor_statistics(
    computed: Mapping[Site, torch.Tensor],
    twin: Mapping[Site, torch.Tensor],
    *,
    attention_mask: torch.Tensor,
    router: Router,
    golden: Mapping[Site, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Measure the floor statistics of one layer: of the golden itself, or of one variant.

    Args:
        computed: BF16 tensors by site, the golden's or the variant's. Sites that it lacks are left out.
        twin: Float32 tensors by site, computed from the same input with the same choice of experts.
        attention_mask: int64 [B,S].
        router: The layer's router.
        golden: None for the golden itself. For a variant, the golden's BF16 tensors by site: they decide which channels
            are massive, and the variant's `structure` is relative to their error.
    """
    real = attention_mask.bool()
    statistics: dict[str, torch.Tensor] = {}
    for site, exact in twin.items():
        # Indices of experts have no error norm.
        if site not in computed or site is Site.ROUTER_EXPERTS:
            continue
        golden_rows = token_rows((golden or computed)[site], site)[real]
        massive = massive_channels(golden_rows)
        statistics |= error_norms(site, computed[site], exact, real=real, massive=massive)
        if golden is None:
            continue
        structure = measure_structure(
            token_rows(exact, site)[real],
            golden_rows,
            token_rows(computed[site], site)[real],
            massive=massive,
        )
        if structure is not None:
            statistics[structure_name(site)] = torch.tensor(structure.figures)
    return statistics | _router_statistics(computed, twin, real=real, router=router)


def variant_statistics(
    computed: Mapping[str, Mapping[Site, torch.Tensor]], twin: Mapping[Site, torch.Tensor], **settings: Any
) -> dict[str, torch.Tensor]:
    """Measure the `floor_statistics` of a layer's variants, under `<variant>/<name>`, with their settings.

    `computed` has the BF16 tensors by variant and site.
    """
    statistics: dict[str, torch.Tensor] = {}
    for variant, tensors in computed.items():
        measured = floor_statistics(tensors, twin, **settings)
        # The margin is the twin's, so it is the same for all variants and stored once.
        measured.pop(ROUTER_MARGIN, None)
        statistics |= {variant_name(variant, name): value for name, value in measured.items()}
    return statistics


def error_norms(
    site: Site | ModelSite,
    computed: torch.Tensor,
    twin: torch.Tensor,
    *,
    real: torch.Tensor,
    massive: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Measure the error norms of one site, float32 [B,S], by their names.

    Args:
        site: The site.
        computed: BF16 tensor of the site.
        twin: float32 tensor of the site.
        real: bool [B,S], false on padding.
        massive: bool [F], true on massive channels; None to find them in `computed`.
    """
    rows = token_rows(computed, site)
    error = rows.to(torch.float32) - token_rows(twin, site).to(torch.float32)
    if massive is None:
        massive = massive_channels(rows[real])
    parts = {
        error_name(site): error,
        ordinary_error_name(site): error[..., ~massive],
        massive_error_name(site): error[..., massive],
    }
    return {name: _zero_padding(part.norm(dim=-1), real) for name, part in parts.items()}


def choice_margin(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the distance [...] of the k-th from the (k+1)-th best of biased scores [...,E]; infinite if k is E."""
    if k >= scores.shape[-1]:
        return torch.full(scores.shape[:-1], torch.inf)
    best = scores.topk(k + 1, dim=-1).values
    return best[..., k - 1] - best[..., k]


def competing_places(k: int, num_experts: int) -> slice:
    """Return the places, in descending order of biased scores, near the k-th; none if all experts are chosen."""
    if k >= num_experts:
        return slice(0, 0)
    return slice(max(k - _NUM_COMPETITORS, 0), min(k + _NUM_COMPETITORS, num_experts))


def _router_statistics(
    computed: Mapping[Site, torch.Tensor],
    twin: Mapping[Site, torch.Tensor],
    *,
    real: torch.Tensor,
    router: Router,
) -> dict[str, torch.Tensor]:
    if Site.ROUTER_LOGITS not in twin or Site.ROUTER_LOGITS not in computed:
        return {}
    exact, noisy = (router.ranking(sites[Site.ROUTER_LOGITS].to(torch.float32)) for sites in (twin, computed))
    k = router.spec.num_experts_per_tok
    return {
        ROUTER_MARGIN: _zero_padding(choice_margin(exact, k), real),
        ROUTER_NOISE: _zero_padding(_competing_error(exact, noisy, k), real),
    }


def _zero_padding(statistic: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Set padding to zero in a statistic [B,S], NaN included."""
    return torch.where(real, statistic, 0.0)


def _competing_error(exact: torch.Tensor, noisy: torch.Tensor, k: int) -> torch.Tensor:
    """Return the largest error [B,S] in those biased scores [B,S,E] that compete for the k-th place."""
    num_experts = exact.shape[-1]
    if k >= num_experts:
        return torch.zeros(exact.shape[:2])
    order = exact.argsort(dim=-1, descending=True)
    competing = order[..., competing_places(k, num_experts)]
    return (noisy - exact).gather(-1, competing).abs().amax(dim=-1)
