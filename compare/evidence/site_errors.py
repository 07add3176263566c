"""Errors of one site: by size, by token and channel, and the worst elements.

T judged tokens, F channels. An error is the port's value minus the float32 twin's; without a twin, minus the golden's.
"""

from __future__ import annotations

import itertools
import math

import torch

from compare.noise.rows import Rows
from reports.page.evidence import ErrorHistogram, ErrorPicture, SiteErrors, WorstElement

# Blocks of a picture: as many as a chart of a screen's width can show, and few enough to draw at once.
_MOST_TOKEN_BLOCKS, _MOST_CHANNEL_BLOCKS = 32, 64
_NUM_BINS = 40
# Errors this much smaller than the largest share the lowest bin.
_SPAN = 1e-8
_MOST_WORST = 12
_MOST_MASSIVE = 32


def measure_site(
    rows: Rows, *, layer: int | None, site: str, why: str, head_dim: int | None = None
) -> SiteErrors:
    """Measure the errors of one site from its judged rows.

    Args:
        rows: The judged tokens of both sides, at least one.
        layer: The layer; None outside the layers.
        site: Name of the site.
        why: Reason to look at it.
        head_dim: Channels of a head, for sites whose channels are heads side by side; None for others.
    """
    exact = (rows.reference if rows.twin is None else rows.twin).float()
    error, noise = rows.target.float() - exact, rows.reference.float() - exact
    return SiteErrors(
        layer=layer,
        site=site,
        why=why,
        num_tokens=error.shape[0],
        num_channels=error.shape[1],
        has_twin=rows.twin is not None,
        histogram=_count(error, noise, has_twin=rows.twin is not None),
        picture=_draw(error, noise, rows),
        worst=_find_worst(error, rows, head_dim=head_dim),
    )


def _count(error: torch.Tensor, noise: torch.Tensor, *, has_twin: bool) -> ErrorHistogram:
    """Count elements by the size of their error; NaN and Inf are left out."""
    sizes, golden = (values[values.isfinite()].abs() for values in (error, noise))
    found = [values[values > 0.0] for values in (sizes, golden)]
    largest = max((float(values.max()) for values in found if len(values)), default=1.0)
    smallest = min((float(values.min()) for values in found if len(values)), default=largest / 10.0)
    low = math.log10(max(smallest, largest * _SPAN))
    # The largest size lies within the last bin, in spite of rounding.
    high = max(math.log10(largest), low + 0.1) + 1e-4
    edges = torch.linspace(low, high, _NUM_BINS + 1, dtype=torch.float64)
    port_counts, golden_counts = (
        tuple(torch.histc(values.log10().clamp(low, high), _NUM_BINS, low, high).long().tolist())
        for values in found
    )
    return ErrorHistogram(
        edges=tuple((10.0**edges).tolist()),
        port=port_counts,
        golden=golden_counts if has_twin else (),
        num_equal=int((sizes == 0.0).sum()),
        num_equal_golden=int((golden == 0.0).sum()) if has_twin else 0,
    )


def _draw(error: torch.Tensor, noise: torch.Tensor, rows: Rows) -> ErrorPicture:
    """Average the squared error over blocks of tokens and channels."""
    num_tokens, num_channels = error.shape
    tokens = _starts(num_tokens, _MOST_TOKEN_BLOCKS)
    channels = _starts(num_channels, _MOST_CHANNEL_BLOCKS)
    floor, unit = _root_mean_square(noise), "the noise"
    if floor == 0.0:  # no twin, or a site at which nothing is rounded
        floor, unit = _root_mean_square(rows.reference.float()) or 1.0, "the golden's values"
    squares = error.square()
    by_block = torch.stack([squares[first:last].sum(dim=0) for first, last in itertools.pairwise(tokens)])
    sums = torch.stack(
        [by_block[:, first:last].sum(dim=1) for first, last in itertools.pairwise(channels)], dim=1
    )
    heights, widths = torch.tensor(tokens).diff(), torch.tensor(channels).diff()
    return ErrorPicture(
        unit=unit,
        token_starts=tokens,
        token_names=tuple(
            _name_tokens(rows.places, first, last) for first, last in itertools.pairwise(tokens)
        ),
        channel_starts=channels,
        blocks=tuple(map(tuple, ((sums / (heights[:, None] * widths[None, :])).sqrt() / floor).tolist())),
        by_token=tuple(((sums.sum(dim=1) / (heights * num_channels)).sqrt() / floor).tolist()),
        by_channel=tuple(((sums.sum(dim=0) / (widths * num_tokens)).sqrt() / floor).tolist()),
        massive=tuple(rows.massive.nonzero().flatten().tolist()[:_MOST_MASSIVE]),
    )


def _root_mean_square(values: torch.Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.double().square().mean().sqrt()) if len(finite) else 0.0


def _starts(count: int, most: int) -> tuple[int, ...]:
    """Return the first index of each of at most `most` blocks of nearly one size, and the end of the last."""
    blocks = min(count, most)
    return tuple(count * block // blocks for block in range(blocks + 1))


def _name_tokens(places: torch.Tensor, first: int, last: int) -> str:
    row, position = places[first].tolist()
    end_row, end_position = places[last - 1].tolist()
    begin = f"row {row}, token {position}"
    if last - first == 1:
        return begin
    return (
        f"{begin} to {end_position}" if row == end_row else f"{begin} to row {end_row}, token {end_position}"
    )


def _find_worst(error: torch.Tensor, rows: Rows, *, head_dim: int | None) -> tuple[WorstElement, ...]:
    """Return the elements with the largest error, NaN and Inf before all others."""
    sizes = error.abs().nan_to_num(nan=math.inf).flatten()
    worst = sizes.topk(min(_MOST_WORST, len(sizes))).indices
    found = []
    for flat in worst.tolist():
        token, channel = divmod(flat, error.shape[1])
        row, position = rows.places[token].tolist()
        head = "" if head_dim is None else f" (head {channel // head_dim}, dim {channel % head_dim})"
        found.append(
            WorstElement(
                row=row,
                position=position,
                place=f"{channel}{head}",
                golden=float(rows.reference[token, channel]),
                port=float(rows.target[token, channel]),
                twin=None if rows.twin is None else float(rows.twin[token, channel]),
                error=float(error[token, channel]),
            )
        )
    return tuple(found)
