"""Whole ports that pad to a bucket, choose tokens, or order their layers: right ones, and such with a mistake in it.

B batch, S columns of a pass, P columns of the cache, K kv heads, D head_dim.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from model_port import Model
from port import Norm


class Bucketed(Model):
    """A right port that pads a prefill to a bucket on the right, and keeps its cache with the padding in it."""

    keeps_cache = True
    bucket = 16  # lengths of prefills are padded to a multiple of it

    def forward(self, input_ids, attention_mask, position_ids):
        """Return the logits [B,S,vocab] of a prefill or of a step; the mask is [B,P+S]."""
        num_columns = input_ids.shape[1]
        if attention_mask.shape[1] > num_columns:
            self.mask = torch.cat((self.mask, torch.ones_like(self.mask[:, :1])), dim=1)
            logits, self.past = super().forward(input_ids, self.mask, position_ids, self.past)
            return logits
        added = -num_columns % self.bucket
        ids, mask, positions = (
            functional.pad(tensor, (0, added)) for tensor in (input_ids, attention_mask, position_ids)
        )
        self.num_columns, self.num_padded = num_columns, added
        logits, self.past = super().forward(ids, mask, positions)
        self.mask = self.mask_of_bucket(mask, num_columns)
        return logits[:, :num_columns]

    def mask_of_bucket(self, mask, num_columns):
        """Return the mask of the cached columns, [B,P]."""
        return mask

    def read_cache(self, past):
        """Return the cache for mm2, without the padding of the bucket: keys and values [B,K,P,D] by layer."""
        behind = self.num_columns + self.num_padded
        return [
            tuple(torch.cat((part[:, :, : self.num_columns], part[:, :, behind:]), dim=2) for part in pair)
            for pair in self.past
        ]


class BucketMask(Bucketed):
    """Steps see the padding of the bucket."""

    def mask_of_bucket(self, mask, num_columns):
        visible = mask.clone()
        visible[:, num_columns:] = 1
        return visible


class PaddingVisible(Bucketed):
    """Steps see all padding of the prefill, that of shorter prompts too."""

    def mask_of_bucket(self, mask, num_columns):
        return torch.ones_like(mask)


class BucketShown(Bucketed):
    """A right port whose cache is shown with the padding of the bucket in it."""

    def read_cache(self, past):
        return self.past


class Sampling(Model):
    """A right port that chooses the next tokens itself."""

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        """Return logits [B,S,vocab], the cache, and the chosen tokens [B]."""
        logits, cache = super().forward(input_ids, attention_mask, position_ids, past_key_values)
        columns = self.last_columns(attention_mask[:, -input_ids.shape[1] :])
        rows = torch.arange(len(input_ids), device=input_ids.device)
        return logits, cache, logits[rows, columns].float().argmax(-1)

    def last_columns(self, mask):
        """Return the column of each prompt's last token, [B]."""
        return (torch.arange(mask.shape[1], device=mask.device) * mask).argmax(-1)


class WrongRowSampled(Sampling):
    """The last column is sampled, which is padding for shorter prompts."""

    def last_columns(self, mask):
        return torch.full((len(mask),), mask.shape[1] - 1, device=mask.device)


class RowBeforeSampled(Sampling):
    """The column before the last token's is sampled."""

    def last_columns(self, mask):
        return (super().last_columns(mask) - 1).clamp(min=0)


class ShardOffsetLost(Sampling):
    """The token of the best shard of the vocabulary, by its number within the shard."""

    num_shards = 4

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        logits, cache, tokens = super().forward(input_ids, attention_mask, position_ids, past_key_values)
        return logits, cache, tokens % (logits.shape[-1] // self.num_shards)


class ShardsUneven(Sampling):
    """The offset of a shard is its rank times its own width, where the first shards are wider."""

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        logits, cache, tokens = super().forward(input_ids, attention_mask, position_ids, past_key_values)
        shards = torch.arange(logits.shape[-1]).tensor_split(5)
        for rank, shard in enumerate(shards):
            is_in_shard = (tokens >= shard[0]) & (tokens <= shard[-1])
            tokens = torch.where(is_in_shard, tokens - shard[0] + rank * len(shard), tokens)
        return logits, cache, tokens


class DrawnTokens(Sampling):
    """A right port that draws its tokens, as MiniMax's generation_config.json asks."""

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        logits, cache, _ = super().forward(input_ids, attention_mask, position_ids, past_key_values)
        rows = torch.arange(len(input_ids))
        columns = self.last_columns(attention_mask[:, -input_ids.shape[1] :])
        values, tokens = logits[rows, columns].float().topk(40, -1)
        return logits, cache, tokens.gather(-1, torch.multinomial(values.softmax(-1), 1))[:, 0]


class AnglesByShape(Model):
    """Positions are kept by the shape of a prefill, as a table of angles is that nobody computes again."""

    def __init__(self, config):
        super().__init__(config)
        self.kept = {}

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        if past_key_values is None:
            position_ids = self.kept.setdefault(tuple(position_ids.shape), position_ids)
        return super().forward(input_ids, attention_mask, position_ids, past_key_values)


class LastLogits(Sampling):
    """A right port that returns each prompt's last logits alone, [B,1,vocab]."""

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        logits, cache, _ = super().forward(input_ids, attention_mask, position_ids, past_key_values)
        columns = self.last_columns(attention_mask[:, -input_ids.shape[1] :])
        return logits[torch.arange(len(input_ids), device=input_ids.device), columns][:, None], cache


class WrongRowReturned(LastLogits):
    """The logits of the last column are returned, which is padding for shorter prompts."""

    def last_columns(self, mask):
        return torch.full((len(mask),), mask.shape[1] - 1, device=mask.device)


class InOrder(Model):
    """A right port whose layers are called in the order of `order`."""

    def order(self, num_layers):
        """Return the numbers of the layers, in the order of their calls."""
        return list(range(num_layers))

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        """Return logits [B,S,vocab] and the cache, a pair [B,K,P+S,D] for each layer."""
        states = self.model.embed_tokens(input_ids)
        cache = [None] * len(self.model.layers)
        for index in self.order(len(self.model.layers)):
            past = None if past_key_values is None else past_key_values[index]
            states, cache[index] = self.model.layers[index](
                states, attention_mask, position_ids, past_key_value=past
            )
        cached = next(pair for pair in cache if pair is not None)
        cache = [tuple(map(torch.zeros_like, cached)) if pair is None else pair for pair in cache]
        return self.lm_head(self.model.norm(states)), cache


class LayerSkipped(InOrder):
    """Layer 2 is never called."""

    def order(self, num_layers):
        return [index for index in range(num_layers) if index != 2]


class LayerTwice(InOrder):
    """Layer 1 is called twice in a row."""

    def order(self, num_layers):
        return sorted([*range(num_layers), 1])


class LayersOutOfOrder(InOrder):
    """Layers 1 and 2 change places."""

    def order(self, num_layers):
        return [0, 2, 1, *range(3, num_layers)]


class Handing(Model):
    """A right port whose stream can be changed between two layers, and before the final norm."""

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        """Return logits [B,S,vocab] and the cache, a pair [B,K,P+S,D] for each layer."""
        states, cache = self.model.embed_tokens(input_ids), []
        for index, layer in enumerate(self.model.layers):
            past = None if past_key_values is None else past_key_values[index]
            added = {}
            hook = layer.moe.register_forward_hook(lambda _, __, found, kept=added: kept.update(moe=found))
            output, pair = layer(states, attention_mask, position_ids, past_key_value=past)
            hook.remove()
            cache.append(pair)
            states = self.hand_on(index, states, output, added["moe"])
        return self.lm_head(self.model.norm(states)), cache

    def hand_on(self, index, before, output, added):
        """Return what follows a layer: from its input, its output, and what its experts added, [B,S,H] each."""
        return output

    def is_last(self, index):
        """Decide whether a layer is the last one."""
        return index + 1 == len(self.model.layers)


class LastLayerLeftOut(Handing):
    """The last layer's result is not used."""

    def hand_on(self, index, before, output, added):
        return before if self.is_last(index) else output


class FirstLayerLeftOut(Handing):
    """The first layer's result is not used."""

    def hand_on(self, index, before, output, added):
        return output if index else before


class StageLosesResidual(Handing):
    """Behind layer 1, the next stage is given what the experts added, without the residual."""

    def hand_on(self, index, before, output, added):
        return added if index == 1 else output


class NormLosesResidual(Handing):
    """The final norm is given what the last layer's experts added, without the residual."""

    def hand_on(self, index, before, output, added):
        return added if self.is_last(index) else output


class TokensTransposed(Handing):
    """Behind layer 1, [S,B] is read as [B,S]."""

    def hand_on(self, index, before, output, added):
        return output.transpose(0, 1).reshape(output.shape) if index == 1 else output


class IdsTransposed(Model):
    """The token ids [S,B] are read as [B,S]."""

    def forward(self, input_ids, *inputs, **named):
        return super().forward(input_ids.T.reshape(input_ids.shape), *inputs, **named)


class LogitsOfOtherRows(Model):
    """The rows of the logits are those of other prompts."""

    def forward(self, *inputs, **named):
        logits, cache = super().forward(*inputs, **named)
        return logits.roll(1, dims=0), cache


class WeightsOfAnotherLayer(Model):
    """Layer 2 has the weights of layer 1."""

    def convert_state_dict(self, tensors, config):
        """Convert the whole model at once."""
        converted = {name: tensors[name] for name in tensors if not name.startswith("model.layers.")}
        for index, layer in enumerate(self.model.layers):
            prefix = f"model.layers.{1 if index == 2 else index}."
            own = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
            for name, tensor in layer.convert_state_dict(own, config, index).items():
                converted[f"model.layers.{index}.{name}"] = tensor
        return converted


class NormOfTheDevice(Norm):
    """A kernel of the device."""


class ClassOfTheCpu(Model):
    """The final norm's class is another one in NxD Inference's CPU mode than on the device."""

    def __init__(self, config):
        super().__init__(config)
        chosen = Norm if os.environ.get("NXD_CPU_MODE") == "1" else NormOfTheDevice
        self.model.norm = chosen(config.hidden_size, config.rms_norm_eps)
