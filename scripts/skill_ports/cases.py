"""Cases: the right port with one mistake each; seven that mm2's catalogue names, three that it does not know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_LAYER = Path(__file__).with_name("layer.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedCase:
    """A port with one mistake, made by changing one place of the right port."""

    what: str  # the mistake in a sentence
    right: str  # text of the right port
    wrong: str  # text in its place
    mistake: str = ""  # name in mm2's catalogue; empty if the catalogue does not know it

    @property
    def source(self) -> str:
        """Source of the wrong port.

        Raises:
            ValueError: The right port does not hold the text exactly once.
        """
        text = right_source()
        if text.count(self.right) != 1:
            raise ValueError(f"the right port holds {text.count(self.right)} times: {self.right}")
        return text.replace(self.right, self.wrong)


def right_source() -> str:
    """Return the source of the right port."""
    return _LAYER.read_text(encoding="utf-8")


_NORM_OF_ALL_HEADS = '''        """Normalise x [B,S,heads·D]."""
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)
'''
_NORM_OF_HALVES = '''        """Normalise x [B,S,heads·D]."""
        x32 = x.float().unflatten(-1, (2, -1))
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.flatten(-2).to(x.dtype)
'''
_EXPERTS_IN_ORDER = "        numbers = range(config.num_local_experts)\n"
_EXPERTS_AS_LISTED = """        suffix = ".w1.weight"
        names = sorted(name for name in tensors if name.startswith(f"{moe}experts.") and name.endswith(suffix))
        numbers = [name.removeprefix(f"{moe}experts.").removesuffix(suffix) for name in names]
"""

# In an order that tells nothing; the number of a case is its place, from 1.
CASES = (
    PlantedCase(
        what="Later blocks of queries do not see their own place.",
        right="            places = start + torch.arange(block.shape[2], device=q.device)\n",
        wrong="            places = max(start - 1, 0) + torch.arange(block.shape[2], device=q.device)\n",
    ),
    PlantedCase(
        what="The base of the frequencies is 10000.",
        right="        self.base = config.rope_theta\n",
        wrong='        self.base = getattr(config, "rope_base", 10000.0)\n',
        mistake="rope_theta",
    ),
    PlantedCase(
        what="The halves of w2's inner dim change places.",
        right='            "experts.down": torch.stack([matrix.T for matrix in w2]),\n',
        wrong='            "experts.down": torch.stack([torch.cat(matrix.T.chunk(2)[::-1]) for matrix in w2]),\n',
    ),
    PlantedCase(
        what="Experts are stacked in the order of their names as text.",
        right=_EXPERTS_IN_ORDER,
        wrong=_EXPERTS_AS_LISTED,
        mistake="experts_in_text_order",
    ),
    PlantedCase(
        what="The weights are the largest scores, which need not be those of the chosen experts.",
        right="        weights = scores.gather(-1, chosen)\n",
        wrong="        weights = scores.topk(self.top_k, dim=-1).values\n",
    ),
    PlantedCase(
        what="Queries and keys are normed over halves of the width.",
        right=_NORM_OF_ALL_HEADS,
        wrong=_NORM_OF_HALVES,
        mistake="qk_norm_per_rank",
    ),
    PlantedCase(
        what="The context's heads and tokens are not transposed before they are joined.",
        right="        return self.wo(context.transpose(1, 2).reshape(*x.shape[:2], -1))\n",
        wrong="        return self.wo(context.reshape(*x.shape[:2], -1))\n",
        mistake="attention_context_not_transposed",
    ),
    PlantedCase(
        what="The biased scores weigh the chosen experts.",
        right="        chosen = (scores + self.bias).topk(self.top_k, dim=-1).indices\n"
        "        weights = scores.gather(-1, chosen)\n",
        wrong="        weights, chosen = (scores + self.bias).topk(self.top_k, dim=-1)\n",
        mistake="router_bias_in_weights",
    ),
    PlantedCase(
        what="The up projection is clamped from above.",
        right="            output = (functional.silu(gate) * up) @ self.down[block]\n",
        wrong="            output = (functional.silu(gate) * up.clamp(max=1.0)) @ self.down[block]\n",
        mistake="up_clamped",
    ),
    PlantedCase(
        what="Gate and up lie one above the other, and are cut as even and odd columns.",
        right="            gate, up = (tokens @ self.gate_up[block]).chunk(2, dim=-1)\n",
        wrong="            gate, up = (tokens @ self.gate_up[block]).unflatten(-1, (-1, 2)).unbind(-1)\n",
        mistake="gate_up_interleaved",
    ),
)
