"""OtherSide: the capture on the other side of a comparison, as far as it tells how a dump is to be read.

B prompts, S their padded length, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.sites import ModelSite, Site


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OtherSide:
    """The batch that a dump is laid out as, and values that tell which of the dump's requests are its prompts."""

    mask: torch.Tensor  # bool [B,S], True on real tokens
    input_ids: torch.Tensor | None = None  # int64 [B,S]; None if they are not known
    embedding: torch.Tensor | None = None  # [B,S,H]; None if it is not held
    hidden_size: int | None = None  # H; None if no tensor of that width is held

    @classmethod
    def of(cls, source: CaptureSource) -> OtherSide | None:
        """Read what a capture tells; None if it does not tell its real tokens.

        Raises:
            CaptureError: A file is damaged.
        """
        mask = source.read_attention_mask()
        if mask is None:
            return None
        has_embedding = ModelSite.EMBEDDING in source.model_sites()
        return cls(
            mask=mask.bool(),
            input_ids=source.read_input_ids(),
            embedding=source.read_model(ModelSite.EMBEDDING) if has_embedding else None,
            hidden_size=_hidden_size(source),
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of real tokens of each prompt."""
        return tuple(int(row.sum()) for row in self.mask)

    def prompts(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the real tokens of each prompt: of [B,S] or [B,S,F], one [n] or [n,F] for each."""
        return [row[is_real] for row, is_real in zip(values, self.mask, strict=True)]


def _hidden_size(source: CaptureSource) -> int | None:
    keys: list[tuple[int | None, Site | ModelSite]] = [(None, ModelSite.EMBEDDING)]
    keys += [(layer, site) for layer in source.layers for site in (Site.INPUT, Site.OUTPUT)]
    entries = (source.entry(layer, site) for layer, site in keys)
    return next((entry.shape[-1] for entry in entries if entry is not None), None)
