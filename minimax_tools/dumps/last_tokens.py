"""Last tokens: the rows of a site outside the layers that was computed only for the tokens to sample from.

B prompts, S their padded length, R rows of one pass, F channels.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from minimax_tools.dumps.assembly import DumpAssembly
from minimax_tools.dumps.found_sites import FoundSite, FoundSites
from minimax_tools.dumps.rows import TokenRows
from minimax_tools.errors import CaptureError


@dataclass(frozen=True, slots=True, kw_only=True)
class LastToken:
    """The last token of a prompt in one pass, which has a row of its own.

    Args:
        num_rows: R, the rows of that tensor.
        position: The token's place among the prompt's real tokens.
    """

    step: str
    row: int
    num_rows: int
    prompt: int
    position: int


def is_partial(site: FoundSite, found: FoundSites, rows: TokenRows) -> bool:
    """Decide whether a site holds fewer rows than the prompts have tokens."""
    steps = {step for group in found.passes for step in group}
    if rows.stretches:
        steps = {stretch.step for stretches in rows.stretches for stretch in stretches}
    return sum(_num_rows(site, step) for step in steps) < rows.num_tokens


def find_last_tokens(site: FoundSite, found: FoundSites, rows: TokenRows) -> tuple[LastToken, ...]:
    """Return the rows whose tokens are known, from shapes alone.

    A pass counts only if it holds exactly one row for each prompt or request in it.
    """
    tokens = _scheduled(found, rows) if rows.stretches else _unscheduled(found, rows)
    held = {step: _num_rows(site, step) for step in {token.step for token in tokens}}
    return tuple(token for token in tokens if held[token.step] == token.num_rows)


def held_rows(tokens: tuple[LastToken, ...], mask: torch.Tensor) -> torch.Tensor:
    """Return the places of these tokens in a batch, bool [B,S], given its mask [B,S] of real tokens."""
    held = torch.zeros_like(mask, dtype=torch.bool)
    for token in tokens:
        held[token.prompt, _place(token, mask)] = True
    return held


def read_last_tokens(
    site: FoundSite, tokens: tuple[LastToken, ...], *, assembly: DumpAssembly, mask: torch.Tensor, what: str
) -> torch.Tensor:
    """Read the site as [B,S,F], zeros where the dump holds nothing.

    Raises:
        CaptureError: A file is damaged, or the pieces do not fit together.
    """
    batch: torch.Tensor | None = None
    for step in dict.fromkeys(token.step for token in tokens):
        tensor = assembly.whole(site, step, what=f"{what} in pass {step}")
        flat = tensor.reshape(-1, tensor.shape[-1])
        batch = flat.new_zeros((*mask.shape, flat.shape[-1])) if batch is None else batch
        for token in tokens:
            if token.step == step:
                if len(flat) != token.num_rows:
                    raise CaptureError(
                        f"{what} in pass {step} holds other rows than its shape says",
                        expected=str(token.num_rows),
                        found=str(len(flat)),
                    )
                batch[token.prompt, _place(token, mask)] = flat[token.row]
    assert batch is not None, "a site of which no row is known is not read"
    return batch


def _place(token: LastToken, mask: torch.Tensor) -> int:
    return int(mask[token.prompt].nonzero()[token.position, 0])


def _scheduled(found: FoundSites, rows: TokenRows) -> tuple[LastToken, ...]:
    """Return the last token of each request in each pass, for passes that record their requests."""
    schedule = found.schedule
    if schedule is None:
        return ()
    # Other requests in the same pass have a row too.
    of_pass: dict[str, list[int]] = defaultdict(list)
    whole: dict[tuple[str, int], int] = {}
    for stretches in schedule.stretches.values():
        for stretch in stretches:
            of_pass[stretch.step].append(stretch.row)
            whole[stretch.step, stretch.row] = stretch.stop
    order = {step: sorted(starts) for step, starts in of_pass.items()}
    return tuple(
        LastToken(
            step=stretch.step,
            row=order[stretch.step].index(stretch.row),
            num_rows=len(order[stretch.step]),
            prompt=prompt,
            position=stretch.stop - 1,
        )
        for prompt, stretches in enumerate(rows.stretches)
        for stretch in stretches
        # A request that goes on past the prompt in this pass has the row of a later token.
        if whole[stretch.step, stretch.row] == stretch.stop
    )


def _unscheduled(found: FoundSites, rows: TokenRows) -> tuple[LastToken, ...]:
    """Return the last token of each prompt, in passes that follow each other."""
    groups = found.passes
    if len(groups) == 1:
        return tuple(_of_group(found, groups[0], rows, first_prompt=0))
    if len(groups) != len(rows.lengths):
        return ()
    return tuple(
        token
        for number, group in enumerate(groups)
        for token in _of_group(found, group, rows.of_prompt(number), first_prompt=number)
    )


def _of_group(
    found: FoundSites, group: tuple[str, ...], rows: TokenRows, *, first_prompt: int
) -> Iterator[LastToken]:
    counts = [_all_rows(found, step) for step in group]
    reached = [0] * len(rows.lengths)
    for step, of_pass in zip(group, rows.in_passes(counts), strict=True):
        for number, length in enumerate(of_pass.lengths):
            reached[number] += length
            yield LastToken(
                step=step,
                row=number,
                num_rows=len(of_pass.lengths),
                prompt=first_prompt + number,
                position=reached[number] - 1,
            )


def _all_rows(found: FoundSites, step: str) -> int:
    """Count the rows of a pass by its layers' tensors; the smallest count, as heads add rows."""
    rows = [_num_rows(site, step) for (layer, _), site in found.sites.items() if layer is not None]
    return min((count for count in rows if count), default=0)


def _num_rows(site: FoundSite, step: str) -> int:
    """Count the rows of a site's tensor in one pass; 0 if the pass does not hold it."""
    pieces = site.terms[0].of_pass(step)
    return math.prod(next(iter(pieces.values())).shape[:-1]) if pieces else 0
