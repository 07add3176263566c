"""The batch of token ids that a run computes: one prompt per row, padded to one length."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from minimax_tools.errors import UsageError, number_ranges, word_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTokens:
    """Tokens whose hidden states a golden sets at the input of each layer, so that no expert is left without a token.

    They are the last of a row, so no other token attends to them. Their states are no output of the layer before: only
    a layer that runs on a golden's own input can be judged on them.
    """

    row: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """A batch of token ids: B rows, padded to S tokens. The tensors are int64 [B,S]; ValueError for other shapes."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor  # 1 on real tokens, 0 on padding
    # Counted over each row's real tokens from its first position on. Right padding repeats the row's last position,
    # left padding its first.
    position_ids: torch.Tensor
    source: str  # origin of the rows, in a few words
    is_quick: bool = (
        False  # whether these are the short rows of --quick, which show less than the default rows
    )
    expert_tokens: ExpertTokens | None = None
    last_tokens: int = 0  # number of tokens at each row's end whose values are kept and judged; 0 for all

    def __post_init__(self) -> None:
        shapes = {tuple(tensor.shape) for tensor in self.tensors().values()}
        if len(shapes) != 1 or self.input_ids.ndim != 2:
            raise ValueError(f"inputs need one [B,S] shape, got {sorted(shapes)}")

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return self.input_ids.shape[0]

    @property
    def sequence_length(self) -> int:
        """Padded length S."""
        return self.input_ids.shape[1]

    @property
    def batch_shape(self) -> tuple[int, int]:
        """B and S."""
        return self.batch_size, self.sequence_length

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of real tokens in each row."""
        return tuple(int(length) for length in self.attention_mask.sum(dim=1))

    @property
    def num_tokens(self) -> int:
        """Number of real tokens in all rows."""
        return int(self.attention_mask.sum())

    @property
    def next_positions(self) -> torch.Tensor:
        """Position of the token that follows each row, int64 [B,1]."""
        return self.position_ids.max(dim=1, keepdim=True).values + 1

    @property
    def is_expert_token(self) -> torch.Tensor:
        """Expert tokens among all: bool [B,S]."""
        found = torch.zeros_like(self.attention_mask, dtype=torch.bool)
        if self.expert_tokens is not None:
            row = self.expert_tokens.row
            found[row] = tail_tokens(self.attention_mask[row : row + 1], self.expert_tokens.count)[0]
        return found

    @property
    def is_kept(self) -> torch.Tensor:
        """Tokens that are kept and judged, bool [B,S]: real ones, or the last ones of each row."""
        mask = self.attention_mask
        return tail_tokens(mask, self.last_tokens) if self.last_tokens else mask.bool()

    def unreached_experts(self, router_experts: torch.Tensor, *, num_experts: int) -> tuple[int, ...]:
        """Return the experts that no judged token chose; `router_experts` is [B,S,k]."""
        return tuple(sorted(set(range(num_experts)) - set(router_experts[self.is_kept].unique().tolist())))

    def natural(self) -> Inputs:
        """Return the batch as a model computes it from its tokens alone: expert tokens become padding."""
        if self.expert_tokens is None:
            return self
        mask, row = self.attention_mask.masked_fill(self.is_expert_token, 0), self.expert_tokens.row
        positions = self.position_ids.clone()
        positions[row].clamp_(max=int(positions[row][mask[row].bool()].max()))
        return replace(self, attention_mask=mask, position_ids=positions, expert_tokens=None)

    def plan_calls(self) -> tuple[tuple[int, ...], ...]:
        """Divide the rows among two calls of a layer, of one shape: the rows of each. One row is one call.

        The second call has other positions and another mask, so that what a port keeps of the first by its shape alone
        shows. Each call has two rows at least, as mistakes of a batch need; so few rows are there twice, and their
        values in the second call count.
        """
        lengths = self.lengths
        rows = sorted(range(self.batch_size), key=lambda row: -lengths[row])
        if len(rows) <= 2:
            return (tuple(reversed(rows)), tuple(rows)) if len(rows) == 2 else ((0,),)
        second, first = rows[0::2], rows[1::2]
        return (*first, *second[: len(second) - len(first)]), tuple(second)

    def in_rows(self, rows: Sequence[int]) -> Inputs:
        """Return a batch of these rows, padded as they are."""
        numbers = list(rows)
        return replace(
            self,
            input_ids=self.input_ids[numbers],
            attention_mask=self.attention_mask[numbers],
            position_ids=self.position_ids[numbers],
            expert_tokens=None,
        )

    def row_positions(self) -> list[list[int]]:
        """List the positions of each row's tokens, without padding."""
        return self._without_padding(self.position_ids)

    def real_rows(self) -> list[list[int]]:
        """List the token ids of each row, without padding."""
        return self._without_padding(self.input_ids)

    def _without_padding(self, tensor: torch.Tensor) -> list[list[int]]:
        return [row[mask.bool()].tolist() for row, mask in zip(tensor, self.attention_mask, strict=True)]

    def digest(self) -> str:
        """Compute sha256 over ids, mask and positions."""
        digest = hashlib.sha256()
        for tensor in self.tensors().values():
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(tensor.to(torch.int64).contiguous().numpy().tobytes())
        return digest.hexdigest()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return ids, mask and positions by name, as they are stored."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
        }

    def __str__(self) -> str:
        lengths = ", ".join(str(length) for length in self.lengths)
        return (
            f"{self.batch_size} rows ({lengths} tokens, padded to {self.sequence_length}) from {self.source}"
        )


def pad_rows(
    rows: list[list[int]],
    *,
    padding_side: str | Sequence[str],
    buckets: tuple[int, ...],
    pad_token_id: int,
    source: str,
    start_positions: tuple[int, ...] = (),
) -> Inputs:
    """Pad `rows` to the longest row, or to the smallest of the `buckets` that holds it.

    `padding_side` is `left` or `right`, for all rows or for each. Rows begin at position 0, or at their
    `start_positions`.

    Raises:
        UsageError: No row, an empty row, or a row longer than every bucket.
    """
    if not rows:
        raise UsageError("a run needs at least one row of tokens")
    if not all(rows):
        raise UsageError(f"row {rows.index([])} has no token")
    length = _padded_length(max(len(row) for row in rows), buckets)
    input_ids = torch.full((len(rows), length), pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros((len(rows), length), dtype=torch.int64)
    sides = (padding_side,) * len(rows) if isinstance(padding_side, str) else padding_side
    for index, (row, side) in enumerate(zip(rows, sides, strict=True)):
        start = length - len(row) if side == "left" else 0
        input_ids[index, start : start + len(row)] = torch.tensor(row, dtype=torch.int64)
        attention_mask[index, start : start + len(row)] = 1
    starts = torch.tensor(start_positions or (0,) * len(rows), dtype=torch.int64)
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0) + starts[:, None]
    return Inputs(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, source=source
    )


def _padded_length(longest: int, buckets: tuple[int, ...]) -> int:
    if not buckets:
        return longest
    fitting = [bucket for bucket in buckets if bucket >= longest]
    if not fitting:
        raise UsageError(
            f"the longest row has {longest} tokens",
            expected=f"at most the largest bucket, {max(buckets)}",
            next_step="Give --pad-to a larger bucket, or --max-length to truncate.",
        )
    return min(fitting)


def num_tokens_left(last_position: int, max_position_embeddings: int) -> int:
    """Count the tokens that can be generated after a row whose last token is at `last_position`.

    Positions up to `max_position_embeddings - 1` remain for tokens that are fed to the model. The last generated token
    is not fed, so one more fits.
    """
    return max_position_embeddings - last_position


def random_rows(lengths: tuple[int, ...], *, batch_size: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Draw rows of uniform random token ids: `batch_size` times, a row of each length."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        for _ in range(batch_size)
        for length in lengths
    ]


def format_positions(inputs: Inputs) -> str:
    """Format the positions of the judged tokens as ranges: `positions 0-99, 4096-4111`."""
    positions = inputs.position_ids[inputs.is_kept].unique().tolist()
    words = ", ".join(word_ranges(number_ranges(positions)))
    return f"position{'s' if len(positions) > 1 else ''} {words}"


def decoded_columns(attention_mask: torch.Tensor, num_tokens: int) -> range:
    """Choose the columns of a batch to decode one at a time, out of S; `attention_mask` is [B,S] of 0/1.

    One range serves all prompts. It holds the last `num_tokens` real tokens of each, and ends with the last real token
    of the batch. It begins behind the first token of some prompt, because nothing is cached before a first token. With
    padding on the left, a shorter prompt may begin within the range.
    """
    real_columns = [mask.nonzero().flatten().tolist() for mask in attention_mask]
    # `columns[0]` is a prompt's first token, which is not decoded. A prompt of one token sets no start.
    starts = [columns[max(len(columns) - num_tokens, 1)] for columns in real_columns if len(columns) > 1]
    return range(min(starts), max(columns[-1] for columns in real_columns) + 1)


def tail_tokens(attention_mask: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Decide for each token of a batch whether it is among the last `num_tokens` of its prompt: bool [B,S].

    `attention_mask` is [B,S] of 0/1.
    """
    is_real = attention_mask.bool()
    # Number of real tokens from each one on to the prompt's end, itself included.
    num_left = is_real.long().flip(1).cumsum(1).flip(1)
    return is_real & (num_left <= num_tokens)


def decoded_tokens(attention_mask: torch.Tensor, num_tokens: int, *, by_row: bool) -> torch.Tensor:
    """Decide for each token whether a run decodes the last `num_tokens` of each prompt, 0 for none: bool [B,S].

    If `by_row`, each prompt decodes its own last tokens; else all decode the same columns.
    """
    if by_row or num_tokens == 0:
        is_first = attention_mask.bool() & (attention_mask.cumsum(1) == 1)
        # Nothing is cached before a prompt's first token, so that one is never decoded.
        return tail_tokens(attention_mask, num_tokens) & ~is_first
    columns = decoded_columns(attention_mask, num_tokens)
    indices = torch.arange(attention_mask.shape[1])
    return ((indices >= columns.start) & (indices < columns.stop)).expand(attention_mask.shape)


def number_steps(is_decoded: torch.Tensor) -> torch.Tensor:
    """Return the step that decodes each token, from 1 on in its prompt; 0 for all others: int64 [B,S].

    `is_decoded` is bool [B,S], as `decoded_tokens` gives it by row.
    """
    return is_decoded.long().cumsum(1) * is_decoded
