"""Generation: the tokens that a model generated after each prompt, stored beside its activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from minimax_tools.errors import CaptureError
from minimax_tools.json_codec import decode, omit_default
from minimax_tools.machine.json_file import read_own_json
from minimax_tools.model.inputs import Inputs
from minimax_tools.text.tokenizer import decode_rows, has_tokenizer

GENERATION_NAME = "generation.json"
# Candidates kept for each generated token, which is one of them.
NUM_LIKELIEST = 32


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
        folder: Path,
        likeliest: Sequence[Sequence[Sequence[Likely]]] = (),
    ) -> Generation:
        """Join the prompts of `inputs` with their generated tokens, and decode these if `folder` has a tokenizer.

        `likeliest` has the candidates of each prompt's generated tokens; it is empty if they were not kept.
        """
        generated_rows = [list(ids) for ids in generated]
        texts: Sequence[str | None] = [None] * len(generated_rows)
        if has_tokenizer(folder):
            texts = decode_rows(folder, generated_rows)
        # No candidates for each row, if none were kept.
        likeliest = likeliest or [()] * len(generated_rows)
        rows = tuple(
            Continuation(
                prompt_ids=tuple(prompt_ids),
                generated_ids=tuple(generated_ids),
                text=text,
                likeliest=tuple(tuple(candidates) for candidates in likeliest_of_row),
            )
            for prompt_ids, generated_ids, text, likeliest_of_row in zip(
                inputs.real_rows(), generated_rows, texts, likeliest, strict=True
            )
        )
        return cls(rows=rows, sampling=dict(sampling))

    @classmethod
    def read(cls, directory: Path) -> Generation | None:
        """Read the generation of a capture directory; None if nothing was generated.

        Raises:
            CaptureError: The file is damaged.
        """
        path = directory / GENERATION_NAME
        try:
            return decode(cls, read_own_json(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CaptureError(
                f"{path} is damaged", found=str(error), next_step="Run the capture again."
            ) from error

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
