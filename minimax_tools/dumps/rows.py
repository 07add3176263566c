"""TokenRows: the rows of a dump's tensors that are real tokens, taken out and laid out as a batch.

B prompts, S their padded length, S' the same in the dump, T real tokens of all prompts, T' rows of one pass with its
padding, F channels. A stretch is consecutive tokens of one request in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from minimax_tools.dumps.schedule import Stretch, word_lengths
from minimax_tools.errors import CaptureError

_NAME_THE_ROWS = "Name the rows in a map: lengths, padding (left or right), rows (padded or packed)."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRows:
    """The rows of a dump's tensors that are real tokens of its prompts."""

    lengths: tuple[int, ...]  # number of real tokens of each prompt, in all passes together
    padding: str  # side on which rows are padded: `right` or `left`
    # Whether the prompts' tokens lie one after another; None if a tensor's shape must tell.
    is_packed: bool | None
    # bool [B,S'] of the first pass, True on real tokens; in place of lengths and padding where rows are padded.
    mask: torch.Tensor | None = None
    # Each prompt's rows in the passes; empty if not recorded. If given, callers take them by `take_stretch`, and call
    # none of the methods below.
    stretches: tuple[tuple[Stretch, ...], ...] = ()

    @property
    def num_tokens(self) -> int:
        """T, the real tokens of all prompts."""
        return sum(self.lengths)

    def take(self, tensor: torch.Tensor, *, what: str) -> torch.Tensor:
        """Take the real tokens [T,F] of [B,S',F], [B·S',F], packed [T',F] or [1,T',F]."""
        if tensor.ndim == 3 and tensor.shape[0] == 1 and (len(self.lengths) > 1 or self.is_packed):
            tensor = tensor[0]  # packed [1,T',F]
        if tensor.ndim == 3 and tensor.shape[0] == len(self.lengths):
            return self._take_padded(tensor, what=what)
        if tensor.ndim != 2:
            raise _unreadable(tensor, self.lengths, what=what)
        if self._is_packed(tensor, what=what):
            return self._take_packed(tensor, what=what)
        if tensor.shape[0] % len(self.lengths):
            raise _unreadable(tensor, self.lengths, what=what)
        # [B·S',F]
        return self._take_padded(tensor.reshape(len(self.lengths), -1, tensor.shape[-1]), what=what)

    def in_passes(self, counts: Sequence[int]) -> tuple[TokenRows, ...]:
        """Divide the rows among passes that follow each other; `counts` are the rows of each pass's tensors.

        Passes whose rows add up to a single prompt are its chunks. Else the first pass is a prefill, which may be
        padded, and each of the others decodes one row of each prompt.
        """
        if len(counts) == 1:
            return (self,)
        if self.lengths == (sum(counts),):
            return tuple(replace(self, lengths=(count,), mask=None) for count in counts)
        num_decoding = len(counts) - 1
        prefill = replace(self, lengths=tuple(length - num_decoding for length in self.lengths))
        decoding = replace(self, lengths=(1,) * len(self.lengths), mask=None)
        return (prefill, *[decoding] * num_decoding)

    def of_prompt(self, prompt: int) -> TokenRows:
        """Return the rows of one prompt alone."""
        mask = None if self.mask is None else self.mask[prompt : prompt + 1]
        return replace(self, lengths=self.lengths[prompt : prompt + 1], mask=mask)

    def _is_packed(self, tensor: torch.Tensor, *, what: str) -> bool:
        """Decide whether the prompts' tokens in [rows,F] lie one after another, not as [B·S',F]."""
        if self.is_packed is not None:
            return self.is_packed
        if self.mask is not None and tensor.shape[0] == self.mask.numel():
            return False
        if len(self.lengths) == 1 or tensor.shape[0] == self.num_tokens:
            return True
        raise _unreadable(tensor, self.lengths, what=what)

    def _take_packed(self, tensor: torch.Tensor, *, what: str) -> torch.Tensor:
        if tensor.shape[0] < self.num_tokens:
            raise _too_few(tensor, self.lengths, what=what)
        start = tensor.shape[0] - self.num_tokens if self.padding == "left" else 0
        return tensor[start : start + self.num_tokens]

    def _take_padded(self, tensor: torch.Tensor, *, what: str) -> torch.Tensor:
        length = tensor.shape[1]
        if self.mask is not None:
            if tuple(self.mask.shape) != tuple(tensor.shape[:2]):
                raise CaptureError(
                    f"{what} is of another batch than the attention mask",
                    expected=f"[B,S] of {tuple(self.mask.shape)}",
                    found=str(tuple(tensor.shape)),
                    next_step=_NAME_THE_ROWS,
                )
            return tensor[self.mask]
        if length < max(self.lengths):
            raise _too_few(tensor, self.lengths, what=what)
        positions = torch.arange(length)
        lengths = torch.tensor(self.lengths)[:, None]
        is_real = positions >= length - lengths if self.padding == "left" else positions < lengths
        return tensor[is_real]


def take_stretch(tensor: torch.Tensor, stretch: Stretch, *, num_rows: int | None, what: str) -> torch.Tensor:
    """Take the tokens [n,F] of a stretch out of a pass's packed [T',F], [1,T',F] or [T',1,F].

    Args:
        tensor: The pass's tensor.
        stretch: The tokens.
        num_rows: T'; None if the pass does not tell it.
        what: Name of the tensor in messages.
    """
    if tensor.ndim == 3 and 1 in tensor.shape[:2]:
        tensor = tensor.flatten(0, 1)
    stop = stretch.row + stretch.length
    has_other_rows = num_rows is not None and tensor.shape[0] != num_rows
    if tensor.ndim != 2 or tensor.shape[0] < stop or has_other_rows:
        raise CaptureError(
            f"{what} does not hold the rows that the pass is said to have",
            expected=f"{f'{stop} or more' if num_rows is None else num_rows} rows",
            found=str(list(tensor.shape)),
            next_step=_NAME_THE_ROWS,
        )
    return tensor[stretch.row : stop]


def join_passes(passes: Sequence[torch.Tensor], lengths: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Join the tokens of passes that follow each other to [T,F], prompt by prompt.

    Args:
        passes: Real tokens of each pass, prompt by prompt.
        lengths: For each pass, its number of tokens of each prompt.
    """
    by_pass = [tokens.split(of_prompts) for tokens, of_prompts in zip(passes, lengths, strict=True)]
    by_prompt = zip(*by_pass, strict=True)
    return torch.cat([tokens for of_prompt in by_prompt for tokens in of_prompt])


def lay_out(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Lay tokens [T,F] out on the real places of a batch, [B,S,F]; zeros on its padding."""
    batch = tokens.new_zeros((*mask.shape, tokens.shape[-1]))
    batch[mask] = tokens
    return batch


def batch_mask(lengths: tuple[int, ...]) -> torch.Tensor:
    """Return the mask, bool [B,S], of prompts padded on the right to the longest."""
    return torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]


def _too_few(tensor: torch.Tensor, lengths: tuple[int, ...], *, what: str) -> CaptureError:
    return CaptureError(
        f"{what} holds fewer rows than the prompts have tokens",
        expected=f"prompts of {word_lengths(lengths)} tokens",
        found=str(list(tensor.shape)),
        next_step="Choose other passes (steps in a map), or run both sides on the same prompts.",
    )


def _unreadable(tensor: torch.Tensor, lengths: tuple[int, ...], *, what: str) -> CaptureError:
    return CaptureError(
        f"{what}: nothing tells which rows are real",
        expected=f"prompts of {word_lengths(lengths)} tokens as [{len(lengths)},S,F], or one after another",
        found=str(list(tensor.shape)),
        next_step=_NAME_THE_ROWS,
    )
