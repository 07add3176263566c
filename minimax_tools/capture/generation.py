"""Generation: the tokens that a model generated after each prompt, stored beside its activations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from minimax_tools.errors import CaptureError
from minimax_tools.json_codec import decode, omit_default
from minimax_tools.model.inputs import Inputs
from minimax_tools.text.tokenizer import decode_rows, has_tokenizer

GENERATION_NAME = "generation.json"


# Number of the likeliest tokens kept for each generated one, including it.
NUM_LIKELIEST = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Likely:
    """A token that could have come next.

    Args:
        behind: Distance of its logit below the likeliest one's.
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
    """The continuation of one row.

    Args:
        prompt_ids: The row, without padding.
        text: The generated text; None if the checkpoint has no tokenizer.
        likeliest: For each generated token the `NUM_LIKELIEST` candidates, best first; empty if not kept.
    """

    prompt_ids: tuple[int, ...]
    generated_ids: tuple[int, ...]
    text: str | None
    likeliest: tuple[tuple[Likely, ...], ...] = ()


omit_default(Continuation, "likeliest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The continuations of all rows.

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
        """Join the prompts with their generated tokens, and decode these if the folder has a tokenizer.

        Args:
            inputs: The prompts.
            generated: The generated tokens of each prompt.
            sampling: Sampling options.
            folder: The checkpoint's folder.
            likeliest: Candidates of each row and token; empty if not known.
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
        """Read the generation of a capture directory; None if nothing was generated.

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
        """Count in each row the tokens equal to the other's, up to the first that differs."""
        rows = zip(self.rows, other.rows, strict=True)
        pairs = (zip(own.generated_ids, others.generated_ids, strict=False) for own, others in rows)
        return tuple(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], row)) for row in pairs)

    def __str__(self) -> str:
        return "".join(
            f"\nRow {index} continues with {len(row.generated_ids)} token{'s' * (len(row.generated_ids) != 1)}\n"
            f"  ids   {' '.join(str(token) for token in row.generated_ids)}\n"
            f"  text  {row.text if row.text is not None else 'unknown: the checkpoint has no tokenizer'}\n"
            for index, row in enumerate(self.rows)
        )
