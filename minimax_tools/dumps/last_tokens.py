"""Last tokens: the rows of a site that a serving engine computes only for the tokens to sample from.

These are the final norm and the logits, which a pass holds for the last token of each prompt in it; a decoding pass may
hold them for all of its rows, padding included. A pass is one forward pass, a group is several passes that follow each
other for the same prompts, and a stretch is consecutive tokens of one prompt in one pass.
B prompts, S their padded length, R rows of the site's tensor in one pass, F channels.
"""

from __future__ import annotations

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
    """The last token of a prompt in one pass."""

    step: str  # label of the pass
    row: int  # the token's row in the site's tensor
    num_rows: int  # R, the rows that the tensor must have
    prompt: int  # number of the prompt
    position: int  # the token's number among the prompt's real tokens, from 0


def find_last_tokens(site: FoundSite, found: FoundSites, rows: TokenRows) -> tuple[LastToken, ...] | None:
    """Return the tokens whose rows are known, from shapes alone; None if the site has a row for every real token.

    A pass counts only if the site has exactly one row in it for each prompt or request, or one for each row of a pass
    that records them. `found` has the passes, `rows` the prompts' real tokens in them.
    """
    if rows.stretches:
        wanted = [stretch for stretches in rows.stretches for stretch in stretches]
        if all(_has_all_rows(site, found, stretch.step) for stretch in wanted):
            return None
        tokens = _of_requests(site, found, rows)
    else:
        if sum(_num_rows(site, step) for group in found.passes for step in group) >= rows.num_tokens:
            return None
        tokens = _of_prompts(found, rows)
    return tuple(token for token in tokens if _num_rows(site, token.step) == token.num_rows)


def mark_tokens(tokens: tuple[LastToken, ...], mask: torch.Tensor) -> torch.Tensor:
    """Return a mask of these tokens alone, bool [B,S], given the mask [B,S] of all real tokens."""
    marks = torch.zeros_like(mask, dtype=torch.bool)
    for token in tokens:
        marks[token.prompt, _column(token, mask)] = True
    return marks


def read_last_tokens(
    site: FoundSite, tokens: tuple[LastToken, ...], *, assembly: DumpAssembly, mask: torch.Tensor, what: str
) -> torch.Tensor:
    """Read the site as [B,S,F], zeros where the dump holds nothing.

    Raises:
        CaptureError: A file is damaged, or the pieces do not fit together.
    """
    batch: torch.Tensor | None = None
    for step in dict.fromkeys(token.step for token in tokens):
        tensor = assembly.read_pass(site, step, what=f"{what} in pass {step}")
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
                batch[token.prompt, _column(token, mask)] = flat[token.row]
    assert batch is not None, "a site of which no row is known is not read"
    return batch


def _column(token: LastToken, mask: torch.Tensor) -> int:
    """Return the token's column in the batch: padding on the left moves it."""
    return int(mask[token.prompt].nonzero()[token.position, 0])


def _has_all_rows(site: FoundSite, found: FoundSites, step: str) -> bool:
    """Decide whether a site has a row for each row of a pass that records its requests."""
    num_rows, schedule = _num_rows(site, step), found.schedule
    if schedule is None:
        return False
    if step in schedule.num_tokens:
        return num_rows == schedule.num_tokens[step]
    stretches = [one for of_request in schedule.stretches.values() for one in of_request if one.step == step]
    return num_rows >= max(stretch.row + stretch.length for stretch in stretches)


def _of_requests(site: FoundSite, found: FoundSites, rows: TokenRows) -> tuple[LastToken, ...]:
    """Return the last token of each request in each pass, for passes that record their requests."""
    schedule = found.schedule
    if schedule is None:
        return ()
    # The site has a row for every request in a pass, also for requests that are none of the prompts, in the order of
    # their tokens. `stops` has the position behind a request's last token in the pass.
    first_rows: dict[str, list[int]] = defaultdict(list)
    stops: dict[tuple[str, int], int] = {}
    for stretches in schedule.stretches.values():
        for stretch in stretches:
            first_rows[stretch.step].append(stretch.row)
            stops[stretch.step, stretch.row] = stretch.stop
    tokens = []
    for prompt, stretches in enumerate(rows.stretches):
        for stretch in stretches:
            has_all_rows = _has_all_rows(site, found, stretch.step)
            # `rows` ends where the prompt does. If the request has more tokens in this pass, its row is of a later one.
            if not has_all_rows and stops[stretch.step, stretch.row] != stretch.stop:
                continue
            row = sorted(first_rows[stretch.step]).index(stretch.row)
            num_rows = len(first_rows[stretch.step])
            tokens.append(
                LastToken(
                    step=stretch.step,
                    row=stretch.row + stretch.length - 1 if has_all_rows else row,
                    num_rows=_num_rows(site, stretch.step) if has_all_rows else num_rows,
                    prompt=prompt,
                    position=stretch.stop - 1,
                )
            )
    return tuple(tokens)


def _of_prompts(found: FoundSites, rows: TokenRows) -> tuple[LastToken, ...]:
    """Return the last token of each prompt, in passes that follow each other."""
    groups = found.passes
    if len(groups) == 1:
        return tuple(_of_group(found, groups[0], rows, first_prompt=0))
    if len(groups) != len(rows.lengths):
        return ()
    # Each group of passes holds the prompt of its number.
    return tuple(
        token
        for number, group in enumerate(groups)
        for token in _of_group(found, group, rows.of_prompt(number), first_prompt=number)
    )


def _of_group(
    found: FoundSites, group: tuple[str, ...], rows: TokenRows, *, first_prompt: int
) -> Iterator[LastToken]:
    """Yield the last token of each prompt in each pass of a group, whose passes follow each other."""
    counts = [_num_layer_rows(found, step) for step in group]
    num_done = [0] * len(rows.lengths)
    for step, of_pass in zip(group, rows.in_passes(counts), strict=True):
        for number, length in enumerate(of_pass.lengths):
            num_done[number] += length
            yield LastToken(
                step=step,
                row=number,
                num_rows=len(of_pass.lengths),
                prompt=first_prompt + number,
                position=num_done[number] - 1,
            )


def _num_layer_rows(found: FoundSites, step: str) -> int:
    """Count the rows of a pass by its layers' tensors: the smallest count, because [B,N,S,D] counts N times as many."""
    counts = [_num_rows(site, step) for (layer, _), site in found.sites.items() if layer is not None]
    return min((count for count in counts if count), default=0)


def _num_rows(site: FoundSite, step: str) -> int:
    """Count the rows of a site's tensor in one pass; 0 if the pass does not hold it."""
    return site.terms[0].count_rows(step)
