"""Next tokens: how far a run's distributions are from the golden's own; of a whole port in each pass.

The errors of all layers are in them, so they judge nothing: noise grows through a chain. They show what a user of the
port would see.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from compare.judging.logits import divergences
from compare.model_runs.passes import PassSplit
from compare.sides.batch import Batch
from compare.sides.sides import Sides
from minimax_tools.model.sites import ModelSite
from minimax_tools.results.choices import PassLogits


def compare_passes(sides: Sides, split: PassSplit | None) -> tuple[PassLogits, ...]:
    """Compare the logits of each pass, or of all tokens without a `split`, with the golden's.

    Returns () if a side lacks them, or they are not finite.
    """
    if any(ModelSite.LOGITS not in side.model_sites() for side in (sides.reference, sides.target)):
        return ()
    batches: Iterable[tuple[int | None, Batch]] = [(None, sides.batch)]
    if split is not None:
        batches = enumerate((split.prefill, *split.steps))
    compared = (_compare(number, sides, batch) for number, batch in batches)
    return tuple(found for found in compared if found is not None)


def _compare(number: int | None, sides: Sides, batch: Batch) -> PassLogits | None:
    golden, port = (
        batch.rows(side.read_model(ModelSite.LOGITS), ModelSite.LOGITS)
        for side in (sides.reference, sides.target)
    )
    if golden.shape != port.shape:
        return None
    is_held = port.isfinite().all(dim=-1)
    held = sides.target.held_tokens(ModelSite.LOGITS)
    if held is not None:
        is_held &= batch.tokens(held)
    if not bool(is_held.any()):
        return None
    divergence = divergences(golden[is_held], port[is_held])
    worst = int(divergence.argmax())
    places = batch.places(sides.target.read_model(ModelSite.LOGITS), ModelSite.LOGITS)[is_held]
    agrees: torch.Tensor = golden[is_held].argmax(-1) == port[is_held].argmax(-1)
    row, token = places[worst].tolist()
    return PassLogits(
        number=number,
        num_tokens=len(divergence),
        kl_mean=float(divergence.mean()),
        kl_worst=float(divergence[worst]),
        worst_token=(row, token),
        num_agreeing=int(agrees.sum()),
    )
