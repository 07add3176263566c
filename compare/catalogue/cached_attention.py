"""Attention over a cache, right or wrong, of the tokens of all passes but the first: of steps, or of chunks.

B prompts, S columns of the batch, P entries that may be read, N heads, K kv heads, D head_dim, T chosen tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from minimax_tools.capture.passes import CachePair
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import Evaluation, LayerInputs
from minimax_tools.reference.float32_stages import split_heads

HIDDEN = -torch.inf


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodedInputs(LayerInputs):
    """Inputs of a layer of a whole port's run, which decoded the last tokens of each prompt from its own cache."""

    numbers: torch.Tensor  # the pass that computed a token, 0 for the first one and padding: int64 [B,S]
    caches: dict[int, CachePair]  # right keys and values of other layers by number, float32 [B,K,S,D]
    cached: CachePair | None = None  # what the port's cache holds, to take it as it is: float32 [B,K,S,D]
    # Inputs of the layer that padding may have, float32 [H], by name; the batch's own first. Empty if not known
    padding: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def is_decoded(self) -> torch.Tensor:
        """Tokens behind a cache, bool [B,S]."""
        return self.numbers > 0

    @property
    def is_changed(self) -> torch.Tensor:
        """Tokens on which mistakes act, bool [B,S]: of chunks, those of passes of several tokens."""
        if not self.is_chunked:
            return self.is_decoded
        widths = self._counts().max(dim=0).values
        return self.is_decoded & (widths > 1)[self.numbers]

    @property
    def num_decoded(self) -> int:
        """Number of decoded tokens of the longest prompt."""
        return int(self.is_decoded.sum(-1).max())

    @property
    def is_chunked(self) -> bool:
        """True if some pass behind the first takes several tokens of a prompt."""
        return self.num_decoded > int(self.numbers.max())

    @property
    def prefill_width(self) -> int:
        """Number of columns of the first pass."""
        if self.is_chunked:
            return int(self.prefilled().max())
        return int(self.attention_mask.shape[1]) - self.num_decoded

    @property
    def batch_padding(self) -> str:
        """Padding that mm2 gave the port in shorter prompts, by its token and position."""
        if not self.padding:
            return "zeros"
        # In a batch padded on both sides, most rows are padded on the right.
        is_on_the_left = bool(self.attention_mask[:, -1].all())
        return f"{next(iter(self.padding))} at {'0' if is_on_the_left else 'the last'}"

    def prefilled(self) -> torch.Tensor:
        """Return the number of each prompt's tokens in the first pass, int64 [B]."""
        return self.attention_mask.sum(-1) - self.is_decoded.sum(-1)

    def ordinals(self) -> torch.Tensor:
        """Return each token's place in its prompt, from 0 on: int64 [B,S]."""
        return (self.attention_mask.cumsum(1) - 1).clamp(min=0)

    def starts(self) -> torch.Tensor:
        """Return the place in its prompt at which each token's pass begins: int64 [B,S]."""
        counts = self._counts()
        return (counts.cumsum(1) - counts).gather(1, self.numbers)

    def columns(self) -> torch.Tensor:
        """Return the column of each token in a cache that keeps the padding of every pass: int64 [B,S]."""
        counts = self._counts()
        widths = counts.max(dim=0).values
        widths[0] = self.prefill_width
        places = (widths.cumsum(0) - widths)[self.numbers] + self.ordinals() - self.starts()
        is_on_the_left = self.attention_mask[:, :1] == 0
        return places + is_on_the_left * (widths - counts).gather(1, self.numbers)

    def _counts(self) -> torch.Tensor:
        """Return the number of each prompt's tokens in each pass, int64 [B,passes]."""
        is_real = self.attention_mask.bool()
        passes = range(int(self.numbers.max()) + 1)
        return torch.stack([((self.numbers == number) & is_real).sum(1) for number in passes], dim=1)


def decoded_inputs(layer: Evaluation) -> DecodedInputs:
    """Return the inputs of a layer of a whole port's run."""
    assert isinstance(layer.inputs, DecodedInputs), "only whole ports decode from their own cache"
    return layer.inputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheView:
    """Entries of the cache that the chosen tokens read, beside their own keys and values."""

    keys: torch.Tensor  # float32 [B,K,P,D]
    values: torch.Tensor  # float32 [B,K,P,D]
    # Added to the scores, float32 [T,P]: 0 shows an entry, -inf hides it, log n shows it n times.
    shown: torch.Tensor
    shows_own: torch.Tensor  # whether a token reads its own key, bool [T]

    def hide(self, is_hidden: torch.Tensor) -> CacheView:
        """Hide entries, bool [T,P]."""
        return replace(self, shown=self.shown.masked_fill(is_hidden, HIDDEN))

    def with_entry(self, key: torch.Tensor, value: torch.Tensor, num_times: torch.Tensor) -> CacheView:
        """Add an entry [B,K,D], or [K,D] for all prompts, that each token [T] sees so many times."""
        size = (self.keys.shape[0], *self.keys.shape[1:2], self.keys.shape[3])
        return replace(
            self,
            keys=torch.cat((self.keys, key.expand(size)[:, :, None]), dim=2),
            values=torch.cat((self.values, value.expand(size)[:, :, None]), dim=2),
            shown=torch.cat((self.shown, num_times.float().log()[:, None]), dim=1),
        )


def right_view(layer: Evaluation) -> CacheView:
    """Return what decoded tokens read of a right cache: keys and values of the tokens before, or what it holds."""
    rows, columns = token_places(layer)
    is_before = torch.arange(layer.attention_mask.shape[1]) < columns[:, None]
    is_shown = is_before & layer.attention_mask[rows].bool()
    held = decoded_inputs(layer).cached
    keys, values = held or (layer[Site.K_ROPE], split_heads(layer[Site.V_PROJ], layer.spec.head_dim))
    return CacheView(
        keys=keys,
        values=values,
        shown=torch.zeros(is_shown.shape).masked_fill(~is_shown, HIDDEN),
        shows_own=torch.ones(len(rows), dtype=torch.bool),
    )


def token_places(layer: Evaluation) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompt and column of the chosen tokens, int64 [T] each."""
    length = layer.attention_mask.shape[1]
    return layer.tokens.div(length, rounding_mode="floor"), layer.tokens % length


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenPlaces:
    """Places of the tokens of a row, and of the chosen one, in it: int64 [T,S] and [T,1]."""

    is_real: torch.Tensor  # bool [T,S]
    is_changed: torch.Tensor  # tokens on which mistakes act, bool [T,S]
    numbers: torch.Tensor  # passes
    ordinals: torch.Tensor  # places in the prompt
    own_number: torch.Tensor
    own_ordinal: torch.Tensor
    own_start: torch.Tensor  # place at which the chosen token's pass begins

    @classmethod
    def of(cls, layer: Evaluation) -> TokenPlaces:
        """Return the places of a layer's chosen tokens."""
        inputs, (rows, columns) = decoded_inputs(layer), token_places(layer)
        numbers, ordinals, starts = inputs.numbers[rows], inputs.ordinals()[rows], inputs.starts()[rows]
        own = columns[:, None]
        return cls(
            is_real=layer.attention_mask[rows].bool(),
            is_changed=inputs.is_changed[rows],
            numbers=numbers,
            ordinals=ordinals,
            own_number=numbers.gather(1, own),
            own_ordinal=ordinals.gather(1, own),
            own_start=starts.gather(1, own),
        )

    def show(self, layer: Evaluation, is_shown: torch.Tensor) -> CacheView:
        """Return the right cache of which each chosen token sees some entries, bool [T,S], perhaps its own."""
        is_own = self.is_real & (self.ordinals == self.own_ordinal)
        shown = torch.zeros(is_shown.shape).masked_fill(~is_shown | is_own, HIDDEN)
        return replace(right_view(layer), shown=shown, shows_own=(is_shown & is_own).any(1))


def attend_view(layer: Evaluation, view: CacheView) -> torch.Tensor:
    """Compute the context [T,N·D] of the chosen tokens over what they read of the cache, and their own keys."""
    spec, (rows, columns) = layer.spec, token_places(layer)
    group = spec.num_attention_heads // spec.num_key_value_heads
    own_values = split_heads(layer[Site.V_PROJ], spec.head_dim)
    contexts = torch.empty(len(rows), spec.num_attention_heads, spec.head_dim)
    for row in rows.unique().tolist():
        tokens = (rows == row).nonzero().flatten()
        # [N,T,D] of this prompt; every query head reads the kv head of its group.
        queries = layer[Site.Q_ROPE][row][:, columns[tokens]]
        keys, values = (part[row].repeat_interleave(group, dim=0) for part in (view.keys, view.values))
        own_key, own_value = (
            part[row][:, columns[tokens]].repeat_interleave(group, dim=0)
            for part in (layer[Site.K_ROPE], own_values)
        )
        own_score = (queries * own_key).sum(-1, keepdim=True) * spec.head_dim**-0.5
        own_score = own_score.masked_fill(~view.shows_own[tokens][None, :, None], HIDDEN)
        scores = (queries @ keys.transpose(-1, -2)) * spec.head_dim**-0.5 + view.shown[tokens]
        # A token that sees nothing gets zeros, not NaN.
        shares = torch.cat((scores, own_score), dim=-1).softmax(-1).nan_to_num(nan=0.0)
        context = shares[..., :-1] @ values + shares[..., -1:] * own_value
        contexts[tokens] = context.transpose(0, 1)
    return contexts.flatten(1)
