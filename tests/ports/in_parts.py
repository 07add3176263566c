"""The example port computing sites in parts, one call of a submodule for each; every class is a target of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
import planted
import port


class MoeByTokens(port.Moe):
    """Computes the experts over chunks of all tokens; the last chunk is smaller."""

    num_tokens = 10

    def forward(self, states):
        tokens = states.flatten(0, 1)
        parts = [super(MoeByTokens, self).forward(part[None])[0] for part in tokens.split(self.num_tokens)]
        return torch.cat(parts).view(states.shape)


class MoeByColumns(port.Moe):
    """Computes the experts over chunks of each row; the last chunk is smaller."""

    num_columns = 10

    def forward(self, states):
        parts = states.split(self.num_columns, dim=1)
        return torch.cat([super(MoeByColumns, self).forward(part) for part in parts], dim=1)


class MoeOneChunkWrong(MoeByTokens):
    """Scales what the experts make of the second chunk's states."""

    def __init__(self, config):
        super().__init__(config)
        self.num_done = 0

    def activate(self, gate, up):
        self.num_done += 1
        return super().activate(gate, up) * (1.1 if self.num_done % 5 == 3 else 1.0)


class AttentionByRow(port.Attention):
    """Computes one row of the batch after the other."""

    def forward(self, states, attention_mask, position_ids):
        rows = range(states.shape[0])
        inputs = [(states[[row]], attention_mask[[row]], position_ids[[row]]) for row in rows]
        return torch.cat([super(AttentionByRow, self).forward(*row) for row in inputs])


class AttentionWithoutPadding(port.Attention):
    """Computes one row after the other without its padding, of which nothing is left to show."""

    def forward(self, states, attention_mask, position_ids):
        output = torch.zeros_like(states)
        for row, is_real in enumerate(attention_mask.bool()):
            inputs = [whole[row : row + 1, is_real] for whole in (states, attention_mask, position_ids)]
            output[row, is_real] = super().forward(*inputs)[0]
        return output


class AttentionTwice(port.Attention):
    """Computes everything a second time, as where activations are not kept."""

    def forward(self, states, attention_mask, position_ids):
        super().forward(states, attention_mask, position_ids)
        return super().forward(states, attention_mask, position_ids)


class MoeByExpert(port.Moe):
    """Passes each expert's own tokens through a submodule, so that its rows are those of no batch."""

    def __init__(self, config):
        super().__init__(config)
        self.of_expert = nn.Identity()

    def forward(self, states):
        for expert in range(self.down_proj.shape[0]):
            self.of_expert(states.flatten(0, 1)[expert % 7 :])
        return super().forward(states)


class ExpertsByTokens(planted.Planted):
    moe_class = MoeByTokens


class ExpertsByColumns(planted.Planted):
    moe_class = MoeByColumns


class OneChunkWrong(planted.Planted):
    moe_class = MoeOneChunkWrong


class RowByRow(planted.Planted):
    attention = AttentionByRow


class Recomputed(planted.Planted):
    attention = AttentionTwice


class WithoutPadding(planted.Planted):
    attention = AttentionWithoutPadding


class ExpertByExpert(planted.Planted):
    moe_class = MoeByExpert
    sites = {**port.DecoderLayer.sites, "moe_delta": "moe.of_expert"}
