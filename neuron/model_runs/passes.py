"""The passes of a whole port's run: a prefill, and steps that decode each prompt's own next token.

The tokens that a step feeds are the golden's own continuation (teacher forcing): so each step can be judged, whatever
the port chose before. B prompts, S columns of the golden's batch, s columns of a pass, P columns of the port's cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minimax_tools.errors import UsageError
from minimax_tools.model.inputs import Inputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """A forward pass of a whole port: its inputs, and where its tokens lie in the golden's batch."""

    number: int  # 0 for the prefill, t for the t-th step
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
        return Pass(
            number=self.number,
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
    rows = torch.arange(inputs.batch_size)
    for number in range(1, num_decoded + 1):
        columns = torch.stack([row[len(row) - num_decoded + number - 1] for row in real])
        past_mask = passes[-1].attention_mask
        passes.append(
            Pass(
                number=number,
                input_ids=inputs.input_ids[rows, columns][:, None],
                attention_mask=torch.cat((past_mask, torch.ones_like(past_mask[:, :1])), dim=1),
                position_ids=inputs.position_ids[rows, columns][:, None],
                columns=columns[:, None],
            )
        )
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


def _plan_prefill(inputs: Inputs, real: list[torch.Tensor], num_decoded: int, *, pads_right: bool) -> Pass:
    """Take each prompt's tokens but the last `num_decoded`, and keep the padding of the batch."""
    num_columns = inputs.sequence_length - num_decoded
    columns = torch.full((inputs.batch_size, num_columns), -1)
    # Padding takes the tokens and positions that the golden's batch has there.
    source = torch.arange(num_columns).repeat(inputs.batch_size, 1)
    for row, row_columns in enumerate(real):
        kept = row_columns[: len(row_columns) - num_decoded]
        is_left_padded = not pads_right and int(row_columns[0]) > 0
        start = num_columns - len(kept) if is_left_padded else 0
        columns[row, start : start + len(kept)] = kept
        source[row] += num_decoded if is_left_padded else 0
    is_real = columns >= 0
    source = torch.where(is_real, columns, source)
    rows = torch.arange(inputs.batch_size)[:, None]
    pad_token = _pad_token(inputs)
    return Pass(
        number=0,
        input_ids=torch.where(is_real, inputs.input_ids[rows, source], pad_token),
        attention_mask=is_real.long(),
        position_ids=_padded_positions(inputs.position_ids[rows, source], is_real),
        columns=columns,
    )


def _pad_token(inputs: Inputs) -> int:
    """Return the token id of the batch's padding; 0 if it has none."""
    padding = inputs.input_ids[inputs.attention_mask == 0]
    return int(padding[0]) if len(padding) else 0


def _padded_positions(position_ids: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
    """Give padding [B,s] the row's nearest real position: right padding its last, left padding its first."""
    largest = position_ids.masked_fill(~is_real, -1).max(dim=1, keepdim=True).values
    smallest = position_ids.masked_fill(~is_real, 1 << 62).min(dim=1, keepdim=True).values
    is_before = is_real.long().cumsum(1) == 0
    return torch.where(is_real, position_ids, torch.where(is_before, smallest, largest))
