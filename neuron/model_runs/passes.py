"""The passes of a whole port's run: a prefill, and steps that decode each prompt's own next token; or chunks.

The tokens that a step feeds are the golden's own continuation (teacher forcing): so each step can be judged, whatever
the port chose before. Chunks are passes of several tokens, each behind what the ones before have cached: as in a
chunked prefill, behind a cached prefix, and where drafts are verified.
B prompts, S columns of the golden's batch, s columns of a pass, P columns of the port's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from minimax_tools.errors import UsageError
from minimax_tools.model.inputs import Inputs

# Fewer tokens make no pass of several tokens behind another one; fewer than that no more than two passes.
_LEAST_CHUNKED, _LEAST_DIVIDED = 3, 10
# Tokens of a pass that verifies drafts.
_DRAFT = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """A forward pass of a whole port: its inputs, and where its tokens lie in the golden's batch."""

    number: int  # 0 for the prefill or the first chunk, t for the t-th step, or the chunk with t before it
    input_ids: torch.Tensor  # [B,s]
    attention_mask: torch.Tensor  # [B,P+s] of 0/1: the columns of earlier passes, then those of this one
    position_ids: torch.Tensor  # [B,s]
    columns: torch.Tensor  # column of each token in the golden's batch, int64 [B,s]; -1 for padding

    @property
    def batch_shape(self) -> tuple[int, int]:
        """B and s."""
        return self.input_ids.shape[0], self.input_ids.shape[1]

    @property
    def last_columns(self) -> torch.Tensor:
        """Column of this pass that holds each prompt's last real token, int64 [B]."""
        # Padding counts as index 0, so the largest index is that of the last real token.
        indices = torch.arange(self.columns.shape[1]) * (self.columns >= 0)
        last: torch.Tensor = indices.argmax(dim=1)
        return last

    def cut(self, values: torch.Tensor) -> torch.Tensor:
        """Return this pass's columns [B,s,…] of values of the golden's batch, [B,S,…]; padding is zero."""
        rows = torch.arange(len(values))[:, None]
        cut = values[rows, self.columns.clamp(min=0)]
        is_padding = (self.columns < 0).reshape(*self.columns.shape, *(1,) * (values.ndim - 2))
        return cut.masked_fill(is_padding, 0.0)

    def in_rows(self, rows: torch.Tensor) -> Pass:
        """Return this pass with its prompts in other rows: row b gets prompt `rows[b]`, int64 [B]."""
        return replace(
            self,
            input_ids=self.input_ids[rows],
            attention_mask=self.attention_mask[rows],
            position_ids=self.position_ids[rows],
            columns=self.columns[rows],
        )


def plan_passes(inputs: Inputs, num_decoded: int, *, pads_right: bool = False) -> list[Pass]:
    """Plan the prefill and `num_decoded` steps. Each of the prefill's rows is padded on its side in `inputs`.

    With `pads_right`, all are padded on the right, for ports that take no other rows.

    Raises:
        UsageError: A prompt is too short: nothing of it would be left to prefill.
    """
    if num_decoded >= min(inputs.lengths):
        raise UsageError(
            f"of a prompt of {min(inputs.lengths)} tokens {num_decoded} cannot be decoded",
            expected="at least one token of each prompt before the first that is decoded",
            next_step="Give --decode fewer tokens.",
        )
    # Column of each prompt's real tokens in the golden's batch.
    real = [mask.nonzero().flatten() for mask in inputs.attention_mask]
    passes = [_plan_prefill(inputs, real, num_decoded, pads_right=pads_right)]
    for number in range(1, num_decoded + 1):
        columns = [row[len(row) - num_decoded + number - 1 :][:1] for row in real]
        past_mask = passes[-1].attention_mask
        passes.append(_lay_out(inputs, columns, number=number, width=1, past_mask=past_mask))
    return passes


def next_pass(before: Pass, tokens: torch.Tensor, *, last_position: int) -> Pass:
    """Plan the step that feeds `tokens` [B,1] after a pass, to generate freely; they are not in the golden's batch."""
    rows = torch.arange(len(tokens))
    positions = before.position_ids[rows, before.last_columns][:, None] + 1
    return Pass(
        number=before.number + 1,
        input_ids=tokens,
        attention_mask=torch.cat((before.attention_mask, torch.ones_like(tokens)), dim=1),
        position_ids=positions.clamp(max=last_position),
        # Any column but -1: the token is real.
        columns=torch.zeros_like(tokens),
    )


def plan_chunks(inputs: Inputs, *, pads_right: bool = False) -> list[Pass]:
    """Plan passes of several tokens, one of them of a single token, over all tokens; [] if no row has enough.

    A pass takes about the same share of each row, and of the longest row the most: so its columns are no more than the
    batch's. Where a short row has no token left, the pass holds padding alone.
    """
    widths = _chunk_widths(max(inputs.lengths))
    shares = [_share_out(length, widths) for length in inputs.lengths]
    real = [mask.nonzero().flatten() for mask in inputs.attention_mask]
    passes: list[Pass] = []
    for number, width in enumerate(widths):
        starts = [sum(sizes[:number]) for sizes in shares]
        columns = [
            row[start : start + sizes[number]] for row, start, sizes in zip(real, starts, shares, strict=True)
        ]
        past_mask = passes[-1].attention_mask if passes else None
        passes.append(
            _lay_out(inputs, columns, number=number, width=width, past_mask=past_mask, pads_right=pads_right)
        )
    return passes


def _chunk_widths(length: int) -> list[int]:
    """Divide a row of so many tokens: two large chunks, a single token, one as large as drafts, and the rest."""
    if length < _LEAST_CHUNKED:
        return []
    if length < _LEAST_DIVIDED:
        return [length // 3, length - length // 3]
    first = length // 3 + 1
    second = (length - first) // 2 + 1
    rest = length - first - second - 1
    draft = min(_DRAFT, rest // 2)
    return [width for width in (first, second, 1, draft, rest - draft) if width]


def _share_out(length: int, widths: Sequence[int]) -> list[int]:
    """Divide a row of so many tokens as `widths` divide a longer one: at least one token each, as long as there are."""
    sizes: list[int] = []
    longest = sum(widths)
    for width in widths:
        sizes.append(min(max(1, width * length // longest), length - sum(sizes)))
    # What rounding has left goes to the passes that have room.
    for number, width in enumerate(widths):
        sizes[number] += min(width - sizes[number], length - sum(sizes))
    return sizes


def _plan_prefill(inputs: Inputs, real: list[torch.Tensor], num_decoded: int, *, pads_right: bool) -> Pass:
    """Take each prompt's tokens but the last `num_decoded`, and keep the padding of the batch."""
    columns = [row[: len(row) - num_decoded] for row in real]
    width = inputs.sequence_length - num_decoded
    return _lay_out(inputs, columns, number=0, width=width, pads_right=pads_right)


def _lay_out(
    inputs: Inputs,
    columns_of_rows: Sequence[torch.Tensor],
    *,
    number: int,
    width: int,
    past_mask: torch.Tensor | None = None,
    pads_right: bool = False,
) -> Pass:
    """Lay the tokens at some columns of each row out in a pass, padded on the side of the row, or on the right."""
    columns = torch.full((inputs.batch_size, width), -1)
    # Where padding gets its position: at the row's nearest token.
    source = columns.clone()
    for row, of_row in enumerate(columns_of_rows):
        is_left = not pads_right and not inputs.attention_mask[row, 0]
        start = width - len(of_row) if is_left else 0
        columns[row, start : start + len(of_row)] = of_row
        nearest = (
            inputs.attention_mask[row].nonzero()[-1, 0] if not len(of_row) else of_row[0 if is_left else -1]
        )
        source[row] = torch.where(columns[row] >= 0, columns[row], nearest)
    is_real = columns >= 0
    rows = torch.arange(inputs.batch_size)[:, None]
    mask = is_real.long()
    return Pass(
        number=number,
        input_ids=torch.where(is_real, inputs.input_ids[rows, source], _pad_token(inputs)),
        attention_mask=mask if past_mask is None else torch.cat((past_mask, mask), dim=1),
        position_ids=inputs.position_ids[rows, source],
        columns=columns,
    )


def _pad_token(inputs: Inputs) -> int:
    """Return the token id of the batch's padding; 0 if it has none."""
    padding = inputs.input_ids[inputs.attention_mask == 0]
    return int(padding[0]) if len(padding) else 0
