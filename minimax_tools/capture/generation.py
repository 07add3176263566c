"""Generation: what a model says next, row by row, kept beside its activations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimax_tools.errors import CaptureError
from minimax_tools.json_codec import decode, omit_default
from minimax_tools.model.inputs import Inputs
from minimax_tools.text.tokenizer import decode_rows, has_tokenizer

GENERATION_NAME = "generation.json"


# Of each generated token so many of the likeliest are kept, itself among them.
NUM_LIKELIEST = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Likely:
    """A token that could have come next.

    Args:
        token: It.
        behind: How far its logit is below the likeliest one's.
    """

    token: int
    behind: float

    def to_json(self) -> list[Any]:
        """Return the token as a pair: there are many of them."""
        return [self.token, self.behind]

    @classmethod
    def from_json(cls, record: Any) -> Likely:
        """Return the token of a pair."""
        token, behind = decode(tuple[int, float], record)
        return cls(token=token, behind=behind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """How one row goes on.

    Args:
        prompt_ids: The row, without padding.
        generated_ids: What follows.
        text: That as text; None where the checkpoint has no tokenizer.
        likeliest: Of each of them the `NUM_LIKELIEST` tokens that could have come, best first; none where that was
            not kept.
    """

    prompt_ids: tuple[int, ...]
    generated_ids: tuple[int, ...]
    text: str | None
    likeliest: tuple[tuple[Likely, ...], ...] = ()


omit_default(Continuation, "likeliest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How all rows go on.

    Args:
        sampling: How the next token was chosen, by the names of transformers.
        rows: One for each prompt.
    """

    sampling: Mapping[str, Any]
    rows: tuple[Continuation, ...]

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
        """The rows of `inputs` and what was generated for each, as text too where `folder` has a tokenizer.

        Args:
            inputs: The prompts.
            generated: The new tokens of each.
            sampling: How they were chosen.
            folder: The checkpoint's.
            likeliest: Of each row and token, what could have come; none where that is not known.
        """
        rows = [list(ids) for ids in generated]
        texts: Sequence[str | None] = (
            decode_rows(folder, rows) if has_tokenizer(folder) else [None] * len(rows)
        )
        return cls(
            rows=tuple(
                Continuation(
                    prompt_ids=tuple(prompt),
                    generated_ids=tuple(new),
                    text=text,
                    likeliest=tuple(tuple(one) for one in likely),
                )
                for prompt, new, text, likely in zip(
                    inputs.real_rows(), rows, texts, likeliest or [()] * len(rows), strict=True
                )
            ),
            sampling=dict(sampling),
        )

    @classmethod
    def read(cls, directory: Path) -> Generation | None:
        """What was generated when the capture in `directory` was made; None where nothing was.

        Raises:
            CaptureError: The file is damaged.
        """
        path = directory / GENERATION_NAME
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            return decode(cls, record)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CaptureError(
                f"{path} is damaged", found=str(error), next_step="Run the capture again."
            ) from error

    def num_alike(self, other: Generation) -> tuple[int, ...]:
        """Of each row how many tokens are the other's, before the first that is not."""
        return tuple(
            next(
                (
                    index
                    for index, pair in enumerate(zip(mine.generated_ids, theirs.generated_ids, strict=False))
                    if pair[0] != pair[1]
                ),
                min(len(mine.generated_ids), len(theirs.generated_ids)),
            )
            for mine, theirs in zip(self.rows, other.rows, strict=True)
        )

    def __str__(self) -> str:
        return "".join(
            f"\nRow {index} continues with {len(row.generated_ids)} token{'s' * (len(row.generated_ids) != 1)}\n"
            f"  ids   {' '.join(str(token) for token in row.generated_ids)}\n"
            f"  text  {row.text if row.text is not None else 'unknown: the checkpoint has no tokenizer'}\n"
            for index, row in enumerate(self.rows)
        )
