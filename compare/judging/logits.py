"""Logits: how far the port's next-token distributions are from the golden's, and which choices noise explains.

Each token's distributions are compared whole (Kullback-Leibler divergence, in nats) and at their top. The noise to
expect follows from σ, the error of a logit on either side. The divergence is about σ², and the distance between two
logits is off by 2 σ.
T judged tokens, V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from compare.noise.rho import foreseen_error
from compare.noise.rows import Rows
from compare.noise.squared_errors import square_rows
from minimax_tools.results.choices import LogitsResult, TokenChoice

TOP = (1, 5, 10)
# Two logits trade places when their errors, on both sides, add up to the distance between them. 2 σ is usual; four
# times that does not happen in thousands of tokens.
REACH = 8.0
_BLOCK_ROWS = 16
_MOST_NAMED = 5


def logit_noise(rows: Rows, *, usual_error: float) -> torch.Tensor:
    """Return σ, by which a right port's logits may be off from exact ones: of each token [T], in logits.

    Args:
        rows: Both sides' logits.
        usual_error: What a right port is usually off by, relative to the logits, where the golden kept no floor.
    """
    size = math.sqrt(rows.reference.shape[-1])
    if rows.has_floor:
        return foreseen_error(rows).whole.sqrt() / size
    relative = torch.full((rows.num_tokens,), usual_error, dtype=torch.float64)
    if rows.input_error is not None:
        relative = torch.hypot(relative, rows.input_error.inherited)
    return relative * square_rows(rows.reference, massive=rows.massive).whole.sqrt() / size


def compare_logits(rows: Rows, *, usual_error: float) -> LogitsResult:
    """Compare logits [T,V], finite on both sides, a few tokens at a time in float64.

    Args:
        rows: Both sides' logits.
        usual_error: As for `logit_noise`.
    """
    divergence, overlap, golden, port, margin = (
        torch.cat(blocks) for blocks in zip(*_blocks(rows.reference, rows.target), strict=True)
    )
    noise = logit_noise(rows, usual_error=usual_error)
    disagrees = golden != port
    explained = disagrees & (margin <= REACH * noise)
    unexplained = (disagrees & ~explained).nonzero()[:, 0]
    unexplained = unexplained[margin[unexplained].argsort(descending=True, stable=True)]
    worst = int(divergence.argmax())
    row, position = rows.places[worst].tolist()
    return LogitsResult(
        num_tokens=rows.num_tokens,
        kl_mean=float(divergence.mean()),
        kl_p95=float(torch.quantile(divergence, 0.95)),
        kl_worst=float(divergence[worst]),
        worst_token=(row, position),
        kl_mean_foreseen=float(noise.square().mean()),
        kl_p95_foreseen=float(torch.quantile(noise.square(), 0.95)),
        overlaps=dict(zip(TOP, overlap.mean(dim=0).tolist(), strict=True)),
        num_disagreeing=int(disagrees.sum()),
        num_explained=int(explained.sum()),
        worst_choices=tuple(
            TokenChoice(
                row=int(rows.places[token, 0]),
                position=int(rows.places[token, 1]),
                reference=int(golden[token]),
                target=int(port[token]),
                margin=float(margin[token]),
                reach=REACH * float(noise[token]),
            )
            for token in unexplained[:_MOST_NAMED].tolist()
        ),
    )


def _blocks(reference: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield divergence [t], overlaps at the `TOP` [t,3], both choices [t] and their margin [t] of some tokens."""
    for start in range(0, reference.shape[0], _BLOCK_ROWS):
        golden, port = (side[start : start + _BLOCK_ROWS].double() for side in (reference, target))
        log_golden, log_port = golden.log_softmax(dim=-1), port.log_softmax(dim=-1)
        divergence = (log_golden.exp() * (log_golden - log_port)).sum(dim=-1).clamp(min=0.0)
        size = min(max(TOP), golden.shape[-1])
        top_golden, top_port = (side.topk(size, dim=-1).indices for side in (golden, port))
        best = golden.gather(-1, top_golden[:, :1]) - golden.gather(-1, top_port[:, :1])
        # The first of equals is what a greedy choice takes, which topk does not promise.
        choices = golden.argmax(dim=-1), port.argmax(dim=-1)
        overlaps = [_overlap(top_golden[:, :k], top_port[:, :k]) for k in TOP]
        yield divergence, torch.stack(overlaps, dim=-1), *choices, best[:, 0]


def _overlap(golden: torch.Tensor, port: torch.Tensor) -> torch.Tensor:
    """Return the share of the tokens [t,k] that both sides have, [t]."""
    shared = (golden[:, :, None] == port[:, None, :]).any(dim=-1)
    return shared.double().mean(dim=-1)
