"""The example port with mistakes that show far from position 0 or past a window; and right ways to the same angles."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
import cached_port
import planted
import port


class ModuloPositions(planted.Planted):
    """Positions begin anew after 128."""

    class attention(port.Attention):  # noqa: N801 - the name of the part it replaces
        def rotate(self, heads, position_ids):
            return super().rotate(heads, position_ids % 128)


class ClampedPositions(planted.Planted):
    """A table of 4096 positions, past whose end XLA's gather takes the last row."""

    class attention(port.Attention):  # noqa: N801
        def rotate(self, heads, position_ids):
            return super().rotate(heads, position_ids.clamp(max=4095))


class Bfloat16Positions(planted.Planted):
    """Positions in BF16, which has no odd numbers beyond 256."""

    class attention(port.Attention):  # noqa: N801
        def rotate(self, heads, position_ids):
            return super().rotate(heads, position_ids.bfloat16())


class Float16Positions(planted.Planted):
    """Positions in float16, which ends at 65504."""

    class attention(port.Attention):  # noqa: N801
        def rotate(self, heads, position_ids):
            return super().rotate(heads, position_ids.half())


class CountedPositions(planted.Planted):
    """Rows counted from 0, whatever their positions."""

    class attention(port.Attention):  # noqa: N801
        def rotate(self, heads, position_ids):
            return super().rotate(heads, torch.arange(position_ids.shape[1])[None])


class WindowOf128(planted.Planted):
    """A window on a model that has none, as long as other models' windows are."""

    class attention(planted.SlidingWindow.attention):  # noqa: N801
        window = 128


class WindowOf512(planted.Planted):
    """The same, longer than the default rows."""

    class attention(planted.SlidingWindow.attention):  # noqa: N801
        window = 512


class BlackBoxModuloPositions(planted.BlackBox):
    """Positions begin anew after 128, seen from outside."""

    mistake = ModuloPositions


class BlackBoxCountedPositions(planted.BlackBox):
    """Rows counted from 0: no mistake in what a layer gives, since attention sees differences of positions alone."""

    mistake = CountedPositions


class ModuloPositionsWhereDecoded(cached_port.DecoderLayer):
    """Positions begin anew after 128, in a port that decodes."""

    def forward(self, hidden_states, attention_mask, position_ids, past_key_value=None):
        return super().forward(hidden_states, attention_mask, position_ids % 128, past_key_value)


class ExactAngles(planted.Planted):
    """No mistake: the table of cos and sin is made in float64."""

    class attention(port.Attention):  # noqa: N801
        def rotate(self, heads, position_ids):
            dims = torch.arange(0, self.config.rotary_dim, 2, dtype=torch.float64)
            frequencies = float(self.config.rope_theta) ** -(dims / self.config.rotary_dim)
            return _turn(heads, position_ids[:, None, :, None].double() * frequencies)


class DividedAngles(planted.Planted):
    """No mistake: positions are divided by the powers of theta, not multiplied by their inverses."""

    class attention(port.Attention):  # noqa: N801
        def rotate(self, heads, position_ids):
            dims = torch.arange(0, self.config.rotary_dim, 2, dtype=torch.float32)
            powers = self.config.rope_theta ** (dims / self.config.rotary_dim)
            return _turn(heads, position_ids[:, None, :, None].float() / powers)


def _turn(heads, angles):
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    width = 2 * angles.shape[-1]
    first, second = heads[..., :width].chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, heads[..., width:]), dim=-1)
