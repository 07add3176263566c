"""ModelPasses: what a whole port's run shows beside its sites: calls of its layers, its cache, its chosen tokens.

A whole port computes a prefill and decoding steps; each is a pass. Pass 0 is the prefill, pass t the t-th step.
B prompts, K kv heads, S columns of the batch, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from minimax_tools.errors import CaptureError
from minimax_tools.json_codec import decode
from minimax_tools.machine.json_file import read_own_json
from minimax_tools.text_enum import TextEnum

PASSES_NAME = "passes.json"
# Keys and values of a layer, [B,K,S,D] each.
CachePair = tuple[torch.Tensor, torch.Tensor]


class LogitsForm(TextEnum):
    """The tokens that a port's prefill returns logits of."""

    ALL = "all"  # every token
    LAST = "last"  # each prompt's last token alone


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChange:
    """Cached values that a later pass changed, though they are those of earlier tokens."""

    layer: int
    number: int  # the pass that changed them
    kind: str  # `keys` or `values`
    heads: tuple[int, ...]  # kv heads with a change
    places: tuple[tuple[int, int], ...]  # prompt and column of changed tokens, the first few
    num_tokens: int  # number of changed tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The token that a port itself chose after a pass, and the likeliest by its own logits."""

    number: int  # the pass
    row: int
    chosen: int
    likeliest: int
    # Logit of the likeliest token minus that of the chosen one; None if one is not finite, or no such token exists
    behind: float | None
    # Column of the pass whose likeliest token is the chosen one, if another than the last real one: padding, or an
    # earlier token. None if no column's is.
    column: int | None = None
    is_padding: bool = False  # whether that column is padding


@dataclass(frozen=True, slots=True, kw_only=True)
class MisplacedLogits:
    """Logits that a port returned for a prompt's last token, and that are those of another column of the prefill."""

    row: int
    column: int
    is_padding: bool  # whether that column is padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """A pass repeated in the same process, its prompts in other rows of the batch, compared with the first time."""

    number: int  # the pass
    row: int  # the prompt, by its row the first time
    # Norm of the difference of its last token's logits, over the norm of those of the first time
    difference: float
    is_finite: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPasses:
    """The passes of a whole port's run."""

    num_passes: int
    logits: LogitsForm = LogitsForm.ALL
    # For each pass, the layers in the order in which they were called; empty if calls cannot be seen (a compiled graph)
    layer_calls: tuple[tuple[int, ...], ...] = ()
    cached_layers: tuple[int, ...] = ()  # layers whose cache was read and stored
    cache_form: str = ""  # how the cache was read, in words; empty if it was not
    # Entries by which steps write behind their tokens' own: 0, the padding of a bucket, or a mistake
    cache_shift: int = 0
    cache_changes: tuple[CacheChange, ...] = ()
    choices: tuple[Choice, ...] = ()  # empty if the port chooses no tokens itself
    misplaced: tuple[MisplacedLogits, ...] = ()  # logits of other tokens than each prompt's last
    # Columns of the logits beyond the vocabulary, and the largest logit there minus the largest within; None if none
    num_padded_logits: int = 0
    padded_logits_above: float | None = None
    repetitions: tuple[Repetition, ...] = ()  # empty if prompts were not run twice
    classes: Mapping[str, str] | None = (
        None  # class of each submodule of one layer and around the layers, by path
    )
    # The same as built for the other device, if a class differs: path to the two names; None if nobody looked
    other_classes: Mapping[str, tuple[str, str]] | None = None

    @classmethod
    def read(cls, directory: Path) -> ModelPasses | None:
        """Read the passes of a capture directory; None if its run was not one of a whole port.

        Raises:
            CaptureError: The file is damaged.
        """
        path = directory / PASSES_NAME
        try:
            return decode(cls, read_own_json(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CaptureError(
                f"{path} is damaged", found=str(error), next_step="Run the port again."
            ) from error


def pass_name(number: int) -> str:
    """Return the name of a pass: `prefill`, `decode step 2`."""
    return f"decode step {number}" if number else "prefill"


def cache_file(layer: int) -> str:
    """Return the name of the file with a layer's cache."""
    return f"layer_{layer}.cache.safetensors"
