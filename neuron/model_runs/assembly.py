"""Assembly: values of all passes, put where their tokens lie in the golden's batch.

B prompts, S columns of the golden's batch, s columns of a pass, N heads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from minimax_tools.model.sites import ModelSite, Site
from neuron.model_runs.passes import Pass


def assemble_site(
    pieces: Sequence[tuple[Pass, torch.Tensor]],
    site: Site | ModelSite,
    *,
    num_columns: int,
    tokens_first: Collection[Site] = (),
) -> torch.Tensor:
    """Return a site's tensor [B,S,…] or [B,N,S,D] from those of passes, [B,s,…] or [B,N,s,D]; padding is zero.

    At sites in `tokens_first`, a piece with as many heads as tokens is [B,s,N,D]. A piece that is not laid out as its
    pass is returned as it is, for the comparison to judge its shape.
    """
    by_pass = [
        (model_pass, _by_token(piece, site, is_tokens_first=site in tokens_first))
        for model_pass, piece in pieces
    ]
    first = by_pass[0][1]
    for (model_pass, by_token), (_, piece) in zip(by_pass, pieces, strict=True):
        batch_size, num_tokens = model_pass.batch_shape
        is_laid_out = (
            by_token.ndim > 1 and by_token.shape[0] == batch_size and by_token.shape[1] >= num_tokens
        )
        if not is_laid_out or by_token.shape[2:] != first.shape[2:]:
            return piece
    assembled = first.new_zeros((first.shape[0], num_columns, *first.shape[2:]))
    for model_pass, by_token in by_pass:
        rows, columns = (model_pass.columns >= 0).nonzero(as_tuple=True)
        assembled[rows, model_pass.columns[rows, columns]] = by_token[rows, columns]
    return assembled.transpose(1, 2).contiguous() if site.has_heads_dim else assembled


def _by_token(piece: torch.Tensor, site: Site | ModelSite, *, is_tokens_first: bool) -> torch.Tensor:
    """Return a pass's tensor with tokens in front of heads: [B,s,…], or [B,s,N,D]."""
    if not site.has_heads_dim or piece.ndim != 4:
        return piece
    is_as_it_is = is_tokens_first and piece.shape[1] == piece.shape[2]
    return piece if is_as_it_is else piece.transpose(1, 2)


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
            columns = model_pass.columns.gather(1, model_pass.last_columns[:, None])[:, 0]
            # A chunk may hold no token of a short row.
            rows = (columns >= 0).nonzero().flatten()
            assembled[rows, columns[rows]] = logits[rows, 0]
    assert assembled is not None, "a run has a prefill"
    return assembled


def last_logits(model_pass: Pass, logits: torch.Tensor) -> torch.Tensor:
    """Return the logits [B,·] of each row's last real token, from a pass's [B,s,·] or [B,1,·]."""
    if logits.shape[1] == 1:
        return logits[:, 0]
    return logits[torch.arange(len(logits)), model_pass.last_columns]
