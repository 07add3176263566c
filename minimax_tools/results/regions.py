"""WrongRegion: the tokens or channels that hold the wrong values of a site, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

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
