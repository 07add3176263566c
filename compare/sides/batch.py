"""Batch: the real tokens of two captures; padding is never judged.

B prompts, S sequence, T real tokens, F channels of a site. `rows` are tokens here, and not the glossary's sequences.
"""

from __future__ import annotations

import torch

from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import IncomparableError
from minimax_tools.metrics.noise_floor import token_rows
from minimax_tools.model.sites import ModelSite, Site


class Batch:
    """The real tokens of a batch.

    Args:
        mask: [B,S], true on real tokens; None if neither side keeps it, so that every token counts as real.

    Raises:
        IncomparableError: No token is real.
    """

    def __init__(self, mask: torch.Tensor | None) -> None:
        if mask is not None and not bool(mask.any()):
            raise IncomparableError("no token is real: the attention mask is 0 everywhere")
        self._mask = None if mask is None else mask.bool()
        # Numbers of the real tokens; None if all are real, and none need be copied.
        self._real = None if mask is None or bool(mask.all()) else mask.flatten().nonzero().squeeze(-1)

    @classmethod
    def of(cls, reference: CaptureSource, target: CaptureSource) -> Batch:
        """Return the batch that two captures have in common.

        Raises:
            IncomparableError: Their masks differ, or no token is real.
        """
        golden, port = reference.read_attention_mask(), target.read_attention_mask()
        if golden is not None and port is not None and not torch.equal(golden.bool(), port.bool()):
            raise IncomparableError(
                "the captures have different inputs: attention_mask differs",
                expected=f"rows of {_lengths(golden)} tokens (golden)",
                found=_lengths(port),
            )
        kept = reference.read_kept_mask()
        return cls(port if kept is None else kept)

    def rows(self, tensor: torch.Tensor, site: Site | ModelSite) -> torch.Tensor:
        """Return the real tokens [T,F] of a site's tensor, which is [B,S,…] or [B·S,F].

        Raises:
            IncomparableError: The tensor is of another batch.
        """
        return self.tokens(self._laid_out(tensor, site))

    def tokens(self, statistic: torch.Tensor) -> torch.Tensor:
        """Select the real tokens, [T,…], of [B,S,…].

        Raises:
            IncomparableError: The tensor is of another batch.
        """
        if self._mask is None:
            return statistic.flatten(0, 1)
        if statistic.shape[:2] != self._mask.shape:
            raise IncomparableError(
                "a tensor and the attention mask are of different batches",
                expected=f"[B,S] of {tuple(self._mask.shape)}",
                found=str(tuple(statistic.shape[:2])),
                next_step="Capture again: nothing tells which of its tokens are real.",
            )
        tokens = statistic.flatten(0, 1)
        return tokens if self._real is None else tokens.index_select(0, self._real)

    def places(self, tensor: torch.Tensor, site: Site | ModelSite) -> torch.Tensor:
        """Return prompt (0 to B-1) and index in S of every real token of a site's tensor, [T,2]."""
        if self._mask is not None:
            return self._mask.nonzero()
        return torch.ones(self._laid_out(tensor, site).shape[:2]).nonzero()

    def _laid_out(self, tensor: torch.Tensor, site: Site | ModelSite) -> torch.Tensor:
        """Reshape a tensor to [B,S,F]; a flat tensor that does not fit the mask becomes one row, [1,T,F]."""
        if tensor.ndim > 2:
            # Sites of heads are [B,N,S,D] for N heads of D channels: `token_rows` makes [B,S,N·D] of them.
            return token_rows(tensor, site) if isinstance(site, Site) else tensor
        batch: tuple[int, ...] = (1, -1)
        if self._mask is not None and self._mask.numel() == tensor.shape[0]:
            batch = tuple(self._mask.shape)
        return tensor.reshape(*batch, tensor.shape[-1])


def spread_evenly(num_tokens: int, most: int) -> torch.Tensor:
    """Return the indices of at most `most` tokens, evenly spread: int64, ascending."""
    return torch.linspace(0, num_tokens - 1, min(num_tokens, most)).round().long()


def _lengths(mask: torch.Tensor) -> str:
    return ", ".join(str(int(length)) for length in mask.reshape(-1, mask.shape[-1]).sum(dim=-1))
