"""Whole ports, right or with a mistake each, that only some prompts or some passes show, or that hide their layers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "examples"))

from model_port import Model
from port import Moe


class Halved(nn.Linear):
    """Multiplies in halves that are rounded before they are added, as two ranks do."""

    def forward(self, states):
        width = states.shape[-1] // 2
        first = functional.linear(states[..., :width], self.weight[:, :width])
        return first + functional.linear(states[..., width:], self.weight[:, width:])


class Reordered(Model):
    """Right: sums o_proj in halves, and the experts one by one from the last on, each sum in BF16."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.o_proj.__class__ = Halved
            layer.moe.__class__ = ReversedMoe


class ReversedMoe(Moe):
    """Experts one by one, the last first, added in BF16."""

    def forward(self, states):
        tokens = states.flatten(0, 1)
        _, weights, experts = self.router(tokens)
        total = torch.zeros_like(tokens)
        for expert in reversed(range(len(self.down_proj))):
            chosen, places = torch.where(experts == expert)
            gate, up = (tokens[chosen] @ self.gate_up_proj[expert].T).chunk(2, dim=-1)
            output = self.activate(gate, up) @ self.down_proj[expert].T
            total[chosen] += output * weights[chosen, places, None].to(output.dtype)
        return total.unflatten(0, states.shape[:2])


class RestartedPositions(Model):
    """Counts positions from 0 again when it decodes."""

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        if past_key_values is not None:
            position_ids = torch.zeros_like(position_ids)
        return super().forward(input_ids, attention_mask, position_ids, past_key_values)


class Changed(Model):
    """Changes what the port returns; `step` counts the passes of a batch from 0."""

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        self.step = 0 if past_key_values is None else self.step + 1
        logits, cache = super().forward(input_ids, attention_mask, position_ids, past_key_values)
        return self.change(logits, cache, input_ids, attention_mask)


class LostValues(Changed):
    """From the third decoding step on, hands on a cache without values."""

    def change(self, logits, cache, input_ids, attention_mask):
        if self.step >= 3:
            cache = [(keys, torch.zeros_like(values)) for keys, values in cache]
        return logits, cache


class WrongAfterStep(Changed):
    """From the third decoding step on, exchanges the logits' halves."""

    def change(self, logits, cache, input_ids, attention_mask):
        return (logits.roll(logits.shape[-1] // 2, -1) if self.step >= 3 else logits), cache


class SeesPadding(Model):
    """Attends to the padding too."""

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        return super().forward(input_ids, torch.ones_like(attention_mask), position_ids, past_key_values)


class LastColumn(Changed):
    """Returns the logits of the last column, which may be padding."""

    def change(self, logits, cache, input_ids, attention_mask):
        return logits[:, -1:], cache


class LastToken(Changed):
    """Right: returns the logits of each prompt's last token alone."""

    def change(self, logits, cache, input_ids, attention_mask):
        num_columns = input_ids.shape[1]
        last = (attention_mask[:, -num_columns:] * torch.arange(num_columns)).argmax(dim=1)
        return logits[torch.arange(len(last)), last][:, None], cache


class SwappedGateUp(Model):
    """Has gate and up exchanged in layer 2."""

    def convert_state_dict(self, tensors, config, layer_idx):
        converted = super().convert_state_dict(tensors, config, layer_idx)
        if layer_idx == 2:
            name = "model.layers.2.moe.gate_up_proj"
            converted[name] = torch.cat(converted[name].chunk(2, dim=1)[::-1], dim=1)
        return converted


class WrongWord(Changed):
    """Fails on prompts that hold token 200: exchanges the halves of the logits from there on, in the same pass."""

    def change(self, logits, cache, input_ids, attention_mask):
        has_word = (input_ids == 200).long().cumsum(dim=1) > 0
        return torch.where(has_word[..., None], logits.roll(logits.shape[-1] // 2, -1), logits), cache


class Short(Changed):
    """Returns the logits of one shard of the vocabulary."""

    def change(self, logits, cache, input_ids, attention_mask):
        return logits[..., : logits.shape[-1] // 2], cache


class Counting(Model):
    """Right: writes a line for each pass to the file that a variable names, and dies after so many."""

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        path = Path(os.environ["COUNTED_PASSES"])
        with path.open("a") as file:
            file.write(f"{list(input_ids.shape)}\n")
        most = int(os.environ.get("MOST_PASSES", "1000000"))
        if len(path.read_text().splitlines()) > most:
            raise RuntimeError("the device is gone")
        return super().forward(input_ids, attention_mask, position_ids, past_key_values)


class OtherExpert(Model):
    """Scales one expert of layer 3 by two."""

    def convert_state_dict(self, tensors, config, layer_idx):
        name = "block_sparse_moe.experts.5.w2.weight"
        if layer_idx == 3:
            tensors = {**tensors, name: 2 * tensors[name]}
        return super().convert_state_dict(tensors, config, layer_idx)


def moved(name: str) -> type[Model]:
    """Return the port with the rows of a tensor outside its layers one off."""

    class Moved(Model):
        def convert_state_dict(self, tensors, config, layer_idx):
            if layer_idx is None:
                tensors[name] = tensors[name].roll(1, 0)
            return super().convert_state_dict(tensors, config, layer_idx)

    return Moved


MovedHead, MovedEmbedding = moved("lm_head.weight"), moved("model.embed_tokens.weight")


class Closed(nn.Module):
    """Right: shows none of its layers, and takes another stream itself, as a compiled graph with a mask would.

    A subclass names the layer of which a tensor's rows are one off.
    """

    layer, tensor = -1, "self_attn.o_proj.weight"

    def __init__(self, config):
        super().__init__()
        self.inner = (Model(config),)
        for name, parameter in self.inner[0].named_parameters():
            self.register_parameter(name.replace(".", "_"), parameter)
        for name, buffer in self.inner[0].named_buffers():
            self.register_buffer(name.replace(".", "_"), buffer)
        self.replaced = None, None
        body = self.inner[0].model
        for point, module in enumerate([*body.layers, body.norm]):
            module.register_forward_pre_hook(self.taking(point))

    def taking(self, point):
        def take(module, inputs):
            at, states = self.replaced
            return (states, *inputs[1:]) if at == point else None

        return take

    def replace_stream(self, point, states):
        self.replaced = point, states

    def convert_state_dict(self, tensors, config, layer_idx):
        if layer_idx == self.layer:
            tensors = tensors.copy()
            tensors[self.tensor] = tensors[self.tensor].roll(1, 0)
        converted = self.inner[0].convert_state_dict(tensors, config, layer_idx)
        return {name.replace(".", "_"): tensor for name, tensor in converted.items()}

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        if os.environ.get("FAIL"):
            raise RuntimeError("out of luck")
        return self.inner[0](input_ids, attention_mask, position_ids, past_key_values)


class ClosedWrong(Closed):
    """Closed, with a mistake in layer 2."""

    layer = 2


class ClosedInDecoding(Closed):
    """Closed, with the rows of the head one off in decoding alone."""

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        logits, cache = super().forward(input_ids, attention_mask, position_ids, past_key_values)
        return (logits if past_key_values is None else logits.roll(1, dims=-1)), cache


class Deaf(ClosedWrong):
    """Takes another stream, it says, and computes with its own."""

    def replace_stream(self, point, states):
        pass


class Headless(Closed):
    """Has a head without weights: no stream moves its logits."""

    def convert_state_dict(self, tensors, config, layer_idx):
        if layer_idx is None:
            tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
        return super().convert_state_dict(tensors, config, layer_idx)


class Mute(Closed):
    """Shows no layer, and takes no other stream."""

    replace_stream = None


class Compiled(Model):
    """Shows its layers and never calls them: a compiled graph has taken their weights."""

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        hooked = [dict(layer._forward_pre_hooks) for layer in self.model.layers]
        for layer in self.model.layers:
            layer._forward_pre_hooks.clear()
        try:
            return super().forward(input_ids, attention_mask, position_ids, past_key_values)
        finally:
            for layer, hooks in zip(self.model.layers, hooked, strict=True):
                layer._forward_pre_hooks.update(hooks)
