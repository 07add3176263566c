"""TokenStream: passages of text as one row of token ids, from which rows for training are drawn."""

from __future__ import annotations

import tokenizers
import torch

from minimax_tools.errors import UsageError
from minimax_tools.synthetic.toy_tokenizer import find_token_ids


class TokenStream:
    """Passages as one row of token ids, with the end token after each passage."""

    def __init__(self, passages: tuple[str, ...], *, tokenizer: tokenizers.Tokenizer) -> None:
        end = find_token_ids(tokenizer).eos_token_id
        encoded = tokenizer.encode_batch(list(passages), add_special_tokens=False)
        self.ids = torch.tensor([id_ for row in encoded for id_ in (*row.ids, end)], dtype=torch.int64)
        self.num_bytes = sum(len(passage.encode()) for passage in passages)

    def draw_rows(self, *, num_rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Draw rows of ids [num_rows, length] that begin anywhere in the text.

        Raises:
            UsageError: The text is shorter than a row.
        """
        self._refuse_short(length)
        starts = torch.randint(len(self.ids) - length + 1, (num_rows, 1), generator=generator)
        return self.ids[starts + torch.arange(length)]

    def cut_rows(self, *, length: int, most: int) -> torch.Tensor:
        """Return the first rows of the text without overlap, at most `most`: [rows, length].

        Raises:
            UsageError: The text is shorter than a row.
        """
        self._refuse_short(length)
        num_rows = min(most, len(self.ids) // length)
        return self.ids[: num_rows * length].view(num_rows, length)

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes of text per token."""
        return self.num_bytes / len(self.ids)

    def _refuse_short(self, length: int) -> None:
        if len(self.ids) < length:
            raise UsageError(
                "there is too little text for a row",
                expected=f"at least {length} tokens, the length of a row",
                found=f"{len(self.ids)} tokens",
                next_step="Give more --text, or a smaller --seq-len.",
            )
