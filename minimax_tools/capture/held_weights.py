"""HeldWeights: what a port holds of a layer's weights, compared with the checkpoint when they were loaded.

A *kind* of weight is the same for all experts: `q_proj`, `w1`.
"""

from __future__ import annotations

from dataclasses import dataclass

from minimax_tools.text_enum import TextEnum


class WeightMistake(TextEnum):
    """A kind of fault in the port's weights. A source element is an element of the checkpoint's layer."""

    MISSING = "missing"  # source elements land nowhere
    DUPLICATED = "duplicated"  # source elements land several times
    SWAPPED = "swapped"  # one weight lies where another belongs: w1 where w3 does
    TRANSPOSED = (
        "transposed"  # rows and columns are exchanged: a transposition is missing or too many, or a reshape
    )
    ORDER = "order"  # rows, columns or experts lie in another order
    SCALED = "scaled"  # multiplied, or a number added
    COMPUTED = "computed"  # computed from several source elements
    DTYPE = "dtype"  # rounded
    # Seen in the values that lie in the port once the checkpoint's layer is loaded:
    ZERO = "zero"  # zero everywhere
    VALUES = "values"  # other numbers than the checkpoint's


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFault:
    """Weights that a port holds otherwise than it should, or than the others of their kind."""

    mistake: WeightMistake
    kinds: tuple[str, ...]
    experts: tuple[int, ...]  # numbers of the experts concerned; () for weights of no expert
    text: str  # what lies there, or how
    is_certain: bool = False  # whether no port can mean it: zeros, NaN. What others mean, their output tells
    is_exception: bool = False  # whether most weights of the kind are held as they should be


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeights:
    """Weights of one layer in a port, over all ranks."""

    compared: tuple[str, ...]  # kinds of which the port holds every number of the checkpoint
    not_compared: tuple[str, ...] = ()  # kinds that it holds in other numbers, or where mm2 does not look
    reason: str = ""  # why those were not compared; empty without any
    faults: tuple[WeightFault, ...] = ()
    is_divided: bool = False  # whether some kind is held by several ranks together, and by none alone
