"""ModelPasses: what a whole port's run shows beside its sites; Generation: the tokens generated after each prompt.

A whole port computes a prefill (pass 0) and decoding steps (pass t). Then it computes the same prompts in chunks: a
capture of their own, in the folder `CHUNKS_FOLDER` of the run's. B prompts, K kv heads, S columns, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch

from minimax_tools.errors import CaptureError
from minimax_tools.json_codec import decode, omit_default
from minimax_tools.machine.json_file import read_own_json
from minimax_tools.model.inputs import Inputs, decoded_tokens, number_steps
from minimax_tools.text_enum import TextEnum

_Record = TypeVar("_Record")
GENERATION_NAME = "generation.json"
# Candidates kept for each generated token, which is one of them.
NUM_LIKELIEST = 32
PASSES_NAME = "passes.json"
# Folder in a run's capture, with that of its chunks.
CHUNKS_FOLDER = "chunks"
# Keys and values of a layer, [B,K,S,D] each.
CachePair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Likely:
    """A token that could have come next."""

    token: int
    behind: float  # logit of the likeliest token minus the logit of this one

    def to_json(self) -> list[Any]:
        """Return the token as a pair, which is shorter than an object: there are many of them."""
        return [self.token, self.behind]

    @classmethod
    def from_json(cls, record: Any) -> Likely:
        """Return the token of a pair."""
        token, behind = decode(tuple[int, float], record)
        return cls(token=token, behind=behind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A prompt, and the tokens generated after it."""

    prompt_ids: tuple[int, ...]  # the prompt's token ids, without padding
    generated_ids: tuple[int, ...]
    text: str | None  # the generated text; None if the checkpoint has no tokenizer
    # For each generated token the `NUM_LIKELIEST` candidates, best first; empty if not kept, as of sampled tokens
    likeliest: tuple[tuple[Likely, ...], ...] = ()


# A file without candidates has no key for them.
omit_default(Continuation, "likeliest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The continuations of all rows."""

    sampling: Mapping[str, Any]  # options by which the next token was chosen, under transformers' names
    rows: tuple[Continuation, ...]  # the prompts and their continuations

    @classmethod
    def of(
        cls,
        inputs: Inputs,
        generated: Sequence[Sequence[int]],
        *,
        sampling: Mapping[str, Any],
        texts: Sequence[str | None],
        likeliest: Sequence[Sequence[Sequence[Likely]]] = (),
    ) -> Generation:
        """Join the prompts of `inputs` with their generated tokens, and the texts of these, which may be None.

        `likeliest` has the candidates of each prompt's generated tokens; it is empty if they were not kept.
        """
        # No candidates for each row, if none were kept.
        of_rows = zip(inputs.real_rows(), generated, texts, likeliest or [()] * len(texts), strict=True)
        rows = tuple(
            Continuation(
                prompt_ids=tuple(prompt_ids),
                generated_ids=tuple(generated_ids),
                text=text,
                likeliest=tuple(map(tuple, candidates)),
            )
            for prompt_ids, generated_ids, text, candidates in of_rows
        )
        return cls(rows=rows, sampling=dict(sampling))

    @classmethod
    def read(cls, directory: Path) -> Generation | None:
        """Read the generation of a capture directory; None if nothing was generated."""
        return _read_record(cls, directory / GENERATION_NAME, next_step="Run the capture again.")

    def num_alike(self, other: Generation) -> tuple[int, ...]:
        """Count in each row the generated tokens before the first that differs from another generation's."""
        return tuple(
            _count_equal(own_row.generated_ids, other_row.generated_ids)
            for own_row, other_row in zip(self.rows, other.rows, strict=True)
        )

    def __str__(self) -> str:
        return "".join(
            f"\nRow {index} continues with {len(row.generated_ids)} token{'' if len(row.generated_ids) == 1 else 's'}\n"
            f"  ids   {' '.join(str(token) for token in row.generated_ids)}\n"
            f"  text  {row.text if row.text is not None else 'unknown: the checkpoint has no tokenizer'}\n"
            for index, row in enumerate(self.rows)
        )


def _count_equal(first: Sequence[int], second: Sequence[int]) -> int:
    # The shorter sequence ends the count.
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


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
    rank: int = 0  # number of tokens that are likelier than the chosen one
    # Columns of the pass whose likeliest token is the chosen one, and that of the prompt's last token; () and 0 if the
    # logits are of each prompt's last token alone
    columns: tuple[int, ...] = ()
    last_column: int = 0
    num_columns: int = 1  # columns of the logits


@dataclass(frozen=True, slots=True, kw_only=True)
class MisplacedLogits:
    """Logits that a port returned for a prompt's last token, and that are those of another column of the prefill."""

    row: int
    column: int
    is_padding: bool  # whether that column is padding


class Repeated(TextEnum):
    """Kind of a repeated pass, by what is another than the first time."""

    OTHER_ROWS = "other rows"  # the prompts lie in other rows of the batch
    SAME_ROWS = "same rows"  # nothing differs but what came before
    OTHER_SHAPE = "other shape"  # other rows, and a column of padding more
    OTHER_NEIGHBOURS = (
        "other neighbours"  # the other rows hold other tokens, as many and at the same positions
    )
    WHOLE = "whole"  # the prefill takes the whole prompt, in another row; a step is compared with that token of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """A prompt that a port computed once more in the same process, compared with the first time."""

    number: int  # the pass
    row: int  # the prompt, by its row the first time
    # Norm of the difference of its last token's logits, over the norm of those of the first time
    difference: float
    is_finite: bool = True
    kind: Repeated = Repeated.OTHER_ROWS
    chosen: int | None = None  # the token that the port chose then; None if it chooses none


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPasses:
    """The passes of a whole port's run."""

    num_passes: int
    # Of a run in chunks, the tokens of each prompt in each pass; () for a prefill and steps of a token
    chunks: tuple[tuple[int, ...], ...] = ()
    untested: str = ""  # why there are no chunks, in a capture that stands for them
    logits: LogitsForm = LogitsForm.ALL
    # For each pass, the layers in the order in which they were called; empty if calls cannot be seen (a compiled graph)
    layer_calls: tuple[tuple[int, ...], ...] = ()
    cached_layers: tuple[int, ...] = ()  # layers whose cache was read and stored
    cache_form: str = ""  # how the cache was read, in words; empty if it was not
    # Entries by which steps write behind their tokens' own: 0, the padding of a bucket, or a mistake
    cache_shift: int = 0
    cache_changes: tuple[CacheChange, ...] = ()
    choices: tuple[Choice, ...] = ()  # empty if the port chooses no tokens itself
    vocab_size: int = 0  # columns of the logits without padding
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
        """Read the passes of a capture directory; None if its run was not one of a whole port."""
        return _read_record(cls, directory / PASSES_NAME, next_step="Run the port again.")

    def number_tokens(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the pass that computed each token: int64 [B,S]; 0 for padding. `attention_mask` is [B,S] of 0/1."""
        if not self.chunks:
            return number_steps(decoded_tokens(attention_mask, self.num_passes - 1, by_row=True))
        sizes = torch.tensor(self.chunks)  # [passes,B]
        # Ordinal of each token in its row, and the ordinals at which passes end.
        ordinals, ends = attention_mask.cumsum(1), sizes.cumsum(0).T.contiguous()
        return torch.searchsorted(ends, ordinals).clamp(max=len(self.chunks) - 1) * attention_mask

    def ends_pass(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """Decide for each token whether it is the last of its prompt in its pass: bool [B,S]."""
        is_real = attention_mask.bool()
        numbers = self.number_tokens(attention_mask)
        last = torch.zeros_like(is_real)
        for row, row_numbers in enumerate(numbers):
            columns = is_real[row].nonzero().flatten()
            # The passes of a row ascend.
            ends = row_numbers[columns].diff(append=torch.tensor([-1])) != 0
            last[row, columns[ends]] = True
        return last


def pass_name(number: int, *, is_chunk: bool = False) -> str:
    """Return the name of a pass: `prefill`, `decode step 2`, `chunk 2`."""
    if is_chunk:
        return f"chunk {number + 1}"
    return f"decode step {number}" if number else "prefill"


def cache_file(layer: int) -> str:
    """Return the name of the file with a layer's cache."""
    return f"layer_{layer}.cache.safetensors"


def _read_record(record_type: type[_Record], path: Path, *, next_step: str) -> _Record | None:
    """Read what a file of a capture holds; None if the capture has no such file."""
    try:
        return decode(record_type, read_own_json(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CaptureError(f"{path} is damaged", found=str(error), next_step=next_step) from error
