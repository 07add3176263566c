"""Assembly: values of all passes, put where their tokens lie in the golden's batch.

B prompts, S columns of the golden's batch, s columns of a pass, N heads.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from minimax_tools.model.sites import ModelSite, Site
from neuron.model_runs.passes import Pass


def assemble_site(
    pieces: Iterable[tuple[Pass, torch.Tensor]], site: Site | ModelSite, *, num_columns: int
) -> torch.Tensor:
    """Return a site's tensor [B,S,…] or [B,N,S,D] from those of passes, [B,s,…] or [B,N,s,D]; padding is zero."""
    assembled: torch.Tensor | None = None
    for model_pass, piece in pieces:
        # Tokens first: [B,s,…], or [B,s,N,D].
        by_token = piece.transpose(1, 2) if site.has_heads_dim else piece
        if assembled is None:
            assembled = by_token.new_zeros((by_token.shape[0], num_columns, *by_token.shape[2:]))
        rows, columns = (model_pass.columns >= 0).nonzero(as_tuple=True)
        assembled[rows, model_pass.columns[rows, columns]] = by_token[rows, columns]
    assert assembled is not None, "a run has a prefill"
    return assembled.transpose(1, 2).contiguous() if site.has_heads_dim else assembled


def assemble_logits(
    pieces: Iterable[tuple[Pass, torch.Tensor]], *, num_columns: int, vocab_size: int
) -> torch.Tensor:
    """Return logits [B,S,vocab] from those of passes: [B,s,·] of all tokens, or [B,1,·] of each row's last one."""
    assembled: torch.Tensor | None = None
    for model_pass, piece in pieces:
        logits = piece[..., :vocab_size]
        if assembled is None:
            assembled = logits.new_zeros((logits.shape[0], num_columns, logits.shape[2]))
        if logits.shape[1] == model_pass.columns.shape[1]:
            rows, columns = (model_pass.columns >= 0).nonzero(as_tuple=True)
            assembled[rows, model_pass.columns[rows, columns]] = logits[rows, columns]
        else:
            rows = torch.arange(len(logits))
            assembled[rows, model_pass.columns[rows, model_pass.last_columns]] = logits[:, 0]
    assert assembled is not None, "a run has a prefill"
    return assembled


def last_logits(model_pass: Pass, logits: torch.Tensor) -> torch.Tensor:
    """Return the logits [B,·] of each row's last real token, from a pass's [B,s,·] or [B,1,·]."""
    if logits.shape[1] == 1:
        return logits[:, 0]
    return logits[torch.arange(len(logits)), model_pass.last_columns]
