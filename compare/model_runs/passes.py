"""The passes of a whole port's run: tokens of the prefill and of each step, the first wrong one, and next tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from compare.judging.logits import divergences
from compare.sides.sides import Batch, Sides
from minimax_tools.capture.passes import pass_name
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import Blame, PassLogits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassSplit:
    """The tokens of a batch, divided by the pass that computed them."""

    numbers: torch.Tensor  # pass of each token, int64 [B,S]: 0 for the prefill and for padding, t for step t
    prefill: Batch
    decoded: Batch | None  # tokens of all steps; None if none was decoded
    steps: tuple[Batch, ...]  # tokens of each step
    is_chunked: bool = (
        False  # whether the passes are chunks: the first is the `prefill`, the others are the `steps`
    )

    def name(self, number: int) -> str:
        """Return the name of a pass, such as `decode step 2`."""
        return pass_name(number, is_chunk=self.is_chunked)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFault:
    """The first pass in which a layer, or the model around them, is wrong."""

    number: int  # 0 for the prefill, t for the t-th step
    blame: tuple[Blame, ...]  # sites to blame in that pass


# Blame of the tokens of a batch.
JudgeBatch = Callable[[Batch], tuple[Blame, ...]]


def split_passes(sides: Sides) -> PassSplit | None:
    """Divide the tokens of a whole port's run by passes; None for other runs."""
    mask, kept = sides.reference.read_attention_mask(), sides.reference.read_kept_mask()
    passes = sides.target.read_passes()
    if sides.target.known_description is None or mask is None or kept is None or passes is None:
        return None
    numbers = passes.number_tokens(mask)
    is_decoded = numbers > 0
    return PassSplit(
        numbers=numbers,
        prefill=Batch(kept & ~is_decoded),
        decoded=Batch(is_decoded) if bool(is_decoded.any()) else None,
        steps=tuple(Batch(numbers == number) for number in range(1, passes.num_passes)),
        is_chunked=bool(passes.chunks),
    )


def find_pass_fault(split: PassSplit, judge: JudgeBatch) -> PassFault | None:
    """Find the first pass whose tokens are wrong; None if none is.

    Steps are judged together, which shows fainter errors than a step alone; then each, for the first that is wrong. If
    none is wrong alone, the first step counts.
    """
    blame = judge(split.prefill)
    if blame:
        return PassFault(number=0, blame=blame)
    together = judge(split.decoded) if split.decoded is not None else ()
    if not together:
        return None
    for number, step in enumerate(split.steps, start=1):
        alone = judge(step)
        if alone:
            return PassFault(number=number, blame=alone)
    return PassFault(number=1, blame=together)


def is_black_box(target: CaptureSource) -> bool:
    """Decide whether a whole port's run holds logits, and no layer's input or output."""
    if target.read_passes() is None or ModelSite.LOGITS not in target.model_sites():
        return False
    shown = {site for layer in target.layers for site in target.sites(layer)}
    return not shown & {Site.INPUT, Site.OUTPUT}


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
        batch.rows(side.read(None, ModelSite.LOGITS), ModelSite.LOGITS)
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
    places = batch.places(sides.target.read(None, ModelSite.LOGITS), ModelSite.LOGITS)[is_held]
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
