"""The example ports with queries and keys in other layouts than [B,heads,S,D]; every class is a target of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "examples"))
import model_port
import port


class TokensFirst(nn.Module):
    """Passes [B,heads,S,D] through a submodule as [B,S,heads,D]."""

    def __init__(self):
        super().__init__()
        self.place = nn.Identity()

    def forward(self, heads):
        return self.place(heads.transpose(1, 2)).transpose(1, 2)


class FlatTokens(TokensFirst):
    """Passes them as [B·S,heads,D]."""

    def forward(self, heads):
        tokens_first = heads.transpose(1, 2)
        return self.place(tokens_first.flatten(0, 1)).view(tokens_first.shape).transpose(1, 2)


class MergedHeads(TokensFirst):
    """Passes them as [B·S,heads·D]."""

    def forward(self, heads):
        tokens_first = heads.transpose(1, 2)
        return self.place(tokens_first.flatten(0, 1).flatten(1)).view(tokens_first.shape).transpose(1, 2)


class LastDimsExchanged(TokensFirst):
    """Passes them as [B,heads,D,S], which is no layout of a site."""

    def forward(self, heads):
        return self.place(heads.transpose(2, 3)).transpose(2, 3)


def show_as(layer, shower):
    """Show a layer's queries and keys through `shower`."""
    layer.self_attn.q_rope, layer.self_attn.k_rope = shower(), shower()
    places = {f"{name}_rope": f"self_attn.{name}_rope.place" for name in "qk"}
    layer.sites = {**type(layer).sites, **places}


class Right(port.DecoderLayer):
    shower = TokensFirst

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        show_as(self, self.shower)


class Flat(Right):
    shower = FlatTokens


class Merged(Right):
    shower = MergedHeads


class UnsignedExperts(port.DecoderLayer):
    """Shows the chosen experts as uint32."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.show = nn.Identity()
        self.sites = {**type(self).sites, "router_experts": "show"}

        def show(_, __, routed):
            self.show(routed[2].to(torch.uint32))

        self.moe.router.register_forward_hook(show)


class OtherShape(Right):
    shower = LastDimsExchanged


class DefaultTheta(Right):
    def __init__(self, config, layer_idx):
        config.rope_theta = 10000.0
        super().__init__(config, layer_idx)


class FlatDefaultTheta(DefaultTheta):
    shower = FlatTokens


class MergedDefaultTheta(DefaultTheta):
    shower = MergedHeads


class OtherShapeAndTheta(DefaultTheta):
    shower = LastDimsExchanged


class Model(model_port.Model):
    """The whole port."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            show_as(layer, TokensFirst)


class ReturnedModel(model_port.Model):
    """The whole port, which shows its sites in what it returns alone, as a compiled one does: [B,S,heads,D]."""

    sites = {}

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        kept, hooks = {}, []
        for index, layer in enumerate(self.model.layers):
            for name in ("q_rope", "k_rope"):

                def keep(_, __, heads, name=f"layer_{index}.{name}"):
                    kept[name] = self.form_of(heads.transpose(1, 2))

                hooks.append(getattr(layer.self_attn, name).register_forward_hook(keep))
        logits, cache = super().forward(input_ids, attention_mask, position_ids, past_key_values)
        for hook in hooks:
            hook.remove()
        return {"logits": logits, "past_key_values": cache, "sites": kept}

    def form_of(self, heads):
        """Return heads [B,S,heads,D] as the port returns them."""
        return heads.contiguous()


class ReturnedFlat(ReturnedModel):
    """[B·S,heads,D]."""

    def form_of(self, heads):
        return heads.flatten(0, 1)


class ReturnedMerged(ReturnedModel):
    """[B·S,heads·D]."""

    def form_of(self, heads):
        return heads.flatten(0, 1).flatten(1)


class ReturnedTooFew(ReturnedModel):
    """[B,S-1,heads,D], which is no layout of a site."""

    def form_of(self, heads):
        return heads[:, 1:]
