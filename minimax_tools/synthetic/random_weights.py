"""Weights of a synthetic model, distributed so that the model behaves as if trained.

| tensor | distribution |
|---|---|
| embedding | two or three massive channels of fixed sign, 20 to 40 times the median channel |
| norms | undo the massive channels: linear layers see mean square 1, and these channels at 2 |
| q_proj, k_proj, q_norm, k_norm | spread between heads: attention logits far from flat |
| o_proj | sized to its share of the stream; massive rows repeat columns of v_proj, so that they grow too |
| router | logits of standard deviation 1.5 to 1.7; biases of 8 to 9.5 lift experts of low scores |
| experts | gate wider than up; w2 sized to its share of the stream |

The stream is the residual stream: hidden states between layers. All its channels grow by the same rate from layer to
layer. A gain is a factor on a row, a head or a channel.

A seed and a name choose a stream of integers (PCG64). A matrix is `code × scale_inv`. A code is a random byte looked up
in a table of 256 FP8 values. Each block of 128 × 128 codes has a scale, which sets the block's standard deviation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from minimax_tools.checkpoint.fp8 import dequantise
from minimax_tools.model import weight_names
from minimax_tools.model.quantisation import BLOCK_SIZE, scale_shape
from minimax_tools.model.spec import ModelSpec

# Largest finite value of float8_e4m3fn.
_FP8_MAX = 448.0


def _unit_levels() -> torch.Tensor:
    # 256 quantiles of the logistic distribution, whose tails are heavier than the normal's: the largest lies at 3.4
    # standard deviations instead of 2.9. The quantile of probability p = (2i+1)/512 is log(p / (1-p)).
    quantiles = torch.tensor([math.log((2 * i + 1) / (511 - 2 * i)) for i in range(256)], dtype=torch.float64)
    return quantiles / quantiles.square().mean().sqrt()


# The value of each byte: float64 [256], mean 0, variance 1.
LEVELS = _unit_levels()
_LEVEL_MAX = float(LEVELS.max())


class RandomStream:
    """A stream of random numbers that depends on a seed and a name only."""

    def __init__(self, *, seed: int, name: str) -> None:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        self._bits = np.random.PCG64(int.from_bytes(digest, "little"))

    def draw_bytes(self, count: int) -> bytearray:
        """Draw `count` uniform bytes."""
        words = self._bits.random_raw(math.ceil(count / 8)).astype("<u8", copy=False)
        return bytearray(words.view(np.uint8).data[:count])

    def draw_normal(self, *shape: int) -> torch.Tensor:
        """Draw float64 numbers of mean 0 and variance 1, within ±4.9, nearly normal."""
        parts = np.frombuffer(self.draw_bytes(16 * math.prod(shape)), dtype="<u2").reshape(*shape, 8)
        # A sum of eight uniform integers is exact on every host; a library's normal numbers are not.
        sums = torch.from_numpy(parts.astype(np.int64).sum(-1)).double()
        return (sums - 4 * 65535) / (65536 * math.sqrt(8 / 12))

    def draw_gain(self, *shape: int, spread: float) -> torch.Tensor:
        """Draw positive lognormal factors, float64, whose mean square is 1."""
        gain = torch.exp(spread * self.draw_normal(*shape))
        return gain / gain.square().mean().sqrt()

    def draw_order(self, count: int) -> torch.Tensor:
        """Draw a random order of the integers below `count`, int64."""
        return torch.argsort(self.draw_normal(count), stable=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRecipe:
    """Distribution of a matrix."""

    std: float  # of a row of gain 1
    row_gain: torch.Tensor  # factor of each row, float64 [rows]
    num_columns: int
    block_spread: float  # standard deviation of the logarithm of the blocks' factors

    def scales(self, stream: RandomStream) -> torch.Tensor:
        """Draw the matrix's `weight_scale_inv`: float32, one value for each block."""
        peak_gain = _block_peaks(self.row_gain)
        grid = scale_shape((len(self.row_gain), self.num_columns))
        block_gain = stream.draw_gain(*grid, spread=self.block_spread)
        return (block_gain * peak_gain[:, None] * (self.std * _LEVEL_MAX / _FP8_MAX)).float()

    def codes(self, stream: RandomStream) -> torch.Tensor:
        """Draw the matrix's FP8 codes as uint8 [rows, columns]; the largest row of a block reaches ±448."""
        row_peaks = _block_peaks(self.row_gain).repeat_interleave(BLOCK_SIZE)[: len(self.row_gain)]
        shares, run_lengths = torch.unique_consecutive(self.row_gain / row_peaks, return_counts=True)
        codes = bytearray()
        # Rows of one gain share a table of codes.
        for share, num_rows in zip(shares.tolist(), run_lengths.tolist(), strict=True):
            values = (LEVELS * (share * _FP8_MAX / _LEVEL_MAX)).float()
            table = bytes(values.to(torch.float8_e4m3fn).view(torch.uint8).tolist())
            codes += stream.draw_bytes(num_rows * self.num_columns).translate(table)
        return torch.frombuffer(codes, dtype=torch.uint8).view(-1, self.num_columns)


def _block_peaks(row_gain: torch.Tensor) -> torch.Tensor:
    """Return the largest gain of each block of rows."""
    return torch.stack([part.max() for part in row_gain.split(BLOCK_SIZE)])


# All numbers are chosen, not measured: they make activations, routing and growth like those of trained models. A spread
# is the standard deviation of a gain's logarithm.
_ATTENTION_SHARE = 0.15  # ‖attn_delta‖ / ‖input‖
_MOE_SHARE = 0.11  # ‖moe_delta‖ / ‖input‖
_EMBEDDING_RMS = 0.1
_WIDE_HIDDEN_SIZE = 2048  # from this hidden size on a model is wide
_NARROW_MASSIVE = (23.0, -21.0)  # massive channels of narrow models, in units of the median channel
_WIDE_MASSIVE = (38.0, -30.0, 22.0)  # the same of wide models
_MASSIVE_AFTER_NORM = 2.0  # mean magnitude of the massive channels after a norm; an ordinary channel has 1
_MASSIVE_SPREAD = 0.05  # of massive channels between tokens
# Growth of massive channels relative to the stream's designed growth: deltas align with the stream, so the stream grows
# a little faster than designed.
_MASSIVE_LEAD = 1.15
_NORM_SPREAD = 0.25  # between channels
_TOKEN_SPREAD = 0.15  # between rows of embedding and lm_head
_BLOCK_SPREAD = 0.25  # between FP8 blocks
_HEAD_SPREAD = 0.3  # between heads of q_proj, k_proj and v_proj
_QK_NORM_MEAN = 1.9
_QK_NORM_HEAD_SPREAD = 0.35  # between heads
_QK_NORM_SPREAD = 0.15  # between dims of a head
_CONTEXT_RMS = 0.75  # of attn_context for values of variance 1, because softmax averages
_GATE_STD = 1.5  # of gate for states of variance 1
_UP_STD = 1.0
_ACTIVATION_RMS = 1.1  # of silu(gate) × up
_EXPERT_SPREAD = 0.15  # between experts' matrices
_BIAS_OF_HEADS = 0.3  # standard deviation of the biases of q_proj, k_proj and v_proj
_ROUTER_LOGIT_STD = 1.5
_BIAS_LIMITS = (8.0, 9.5)  # of the router's correction bias
_BIAS_CENTRES = (8.4, 9.1)  # bounds of a layer's mean bias
_BIAS_STD = 0.10  # within a layer
_OFFSET_OF_BIAS = 8.0  # logits per unit of bias: the inverse of the sigmoid's slope near a score of 0.85
_LOGIT_STD = 2.5  # of the model's logits
_ELEMENTS_AT_ONCE = (
    1 << 22
)  # of embedding and lm_head, made in blocks: 16 MB in float32; another number gives other values


# The matrix of an expert that is like one of a shared expert or a dense MLP.
_OF_WHOLE_MLP = {
    "gate_proj": weight_names.EXPERT_GATE,
    "up_proj": weight_names.EXPERT_UP,
    "down_proj": weight_names.EXPERT_DOWN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualStream:
    """The residual stream as designed: its massive channels and its growth."""

    channels: tuple[int, ...]  # indices of the massive channels
    magnitudes: tuple[float, ...]  # their signed values, in units of the median channel
    hidden_size: int

    @classmethod
    def design(cls, hidden_size: int, *, seed: int) -> ResidualStream:
        """Design the stream of a model of this width; `seed` draws the massive channels."""
        magnitudes = _WIDE_MASSIVE if hidden_size >= _WIDE_HIDDEN_SIZE else _NARROW_MASSIVE
        order = RandomStream(seed=seed, name="massive channels").draw_order(hidden_size)
        return cls(
            channels=tuple(order[: len(magnitudes)].tolist()), magnitudes=magnitudes, hidden_size=hidden_size
        )

    @property
    def massive(self) -> tuple[tuple[int, float], ...]:
        """Channel and signed magnitude of every massive channel."""
        return tuple(zip(self.channels, self.magnitudes, strict=True))

    @property
    def mean_magnitude(self) -> float:
        """Mean magnitude of the massive channels, in units of the median channel."""
        return sum(abs(magnitude) for magnitude in self.magnitudes) / len(self.magnitudes)

    @property
    def rms(self) -> float:
        """Root mean square over all channels, in units of the median channel."""
        return math.sqrt(1 + sum(value * value for value in self.magnitudes) / self.hidden_size)

    @property
    def growth(self) -> float:
        """Relative growth of the median channel in a layer, for deltas orthogonal to the stream."""
        return math.sqrt(1 + self.rms**2 * (_ATTENTION_SHARE**2 + _MOE_SHARE**2)) - 1

    def median_channel(self, layer: int) -> float:
        """Return the root mean square of the median channel at the layer's input."""
        return float(_EMBEDDING_RMS * (1 + self.growth) ** layer)


class SyntheticWeights:
    """Maker of the tensors of the model `spec` by their stored full names; each is made anew, none is kept."""

    def __init__(self, spec: ModelSpec, *, seed: int) -> None:
        self._spec = spec
        self._seed = seed
        self._stream = ResidualStream.design(spec.hidden_size, seed=seed)

    def make(self, name: str, *, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Make the tensor `name` in consecutive blocks of rows, which together have `shape`, on the CPU.

        Copies in all dtypes are one model. Linear layers hold the same FP8 values, dequantised in BF16 and float32
        copies. Tensors that FP8 copies hold in BF16 are rounded to BF16 in float32 copies.
        """
        name = self._spec.family.stored_names.own(name)
        layer = weight_names.layer_of(name)
        # The name in its layer, as `weight_names` has it; tensors outside the layers keep theirs.
        kind = name if layer is None else name.removeprefix(weight_names.layer_prefix(layer))
        if kind in (weight_names.EMBEDDING, weight_names.LM_HEAD):
            yield from self._vocabulary_rows(name, shape=shape, dtype=dtype)
        elif name.endswith("norm.weight"):
            gain = self._norm(name, width=shape[0])
            yield (gain - 1 if self._spec.graph.has_gain_of_one_plus else gain).to(torch.bfloat16).to(dtype)
        elif name.endswith(".bias"):
            yield (_BIAS_OF_HEADS * self._random(name).draw_normal(*shape)).to(torch.bfloat16).to(dtype)
        elif kind == weight_names.GATE:
            yield self._gate(name, shape=shape).to(dtype)
        elif kind == weight_names.CORRECTION_BIAS:
            yield self._correction_bias(name, count=shape[0]).to(dtype)
        elif name.endswith(weight_names.SCALE_SUFFIX):
            yield self._scales(name.removesuffix("_scale_inv"))
        elif dtype == torch.float8_e4m3fn:
            yield self._codes(name).view(dtype)
        else:
            yield dequantise(self._codes(name).view(torch.float8_e4m3fn), self._scales(name), dtype=dtype)

    def _random(self, name: str) -> RandomStream:
        return RandomStream(seed=self._seed, name=name)

    def _vocabulary_rows(
        self, name: str, *, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        random, is_embedding = self._random(name), name == weight_names.EMBEDDING
        std = _EMBEDDING_RMS if is_embedding else _LOGIT_STD / math.sqrt(self._spec.hidden_size)
        # A multiple of 8 rows: the stream draws words of 8 bytes, and every block but the last uses whole words.
        rows_at_once = max(8, _ELEMENTS_AT_ONCE // shape[1] // 8 * 8)
        for start in range(0, shape[0], rows_at_once):
            num_rows = min(rows_at_once, shape[0] - start)
            recipe = MatrixRecipe(std=std, row_gain=_ones(num_rows), num_columns=shape[1], block_spread=0.0)
            # Not stored in FP8: codes are just a fast source of numbers that are the same on every host.
            codes, scales = recipe.codes(random), recipe.scales(random)
            values = dequantise(codes.view(torch.float8_e4m3fn), scales, dtype=torch.float32)
            values *= random.draw_gain(num_rows, 1, spread=_TOKEN_SPREAD).float()
            if is_embedding:
                for channel, magnitude in self._stream.massive:
                    gain = random.draw_gain(num_rows, spread=_MASSIVE_SPREAD).float()
                    values[:, channel] = std * magnitude * gain
            yield values.to(torch.bfloat16).to(dtype)

    def _norm(self, name: str, *, width: int) -> torch.Tensor:
        random, head_dim = self._random(name), self._spec.head_dim
        if name.endswith(weight_names.INDEXER):
            return random.draw_gain(width, spread=_QK_NORM_SPREAD)
        if name.endswith((weight_names.Q_NORM, weight_names.K_NORM)):
            heads = random.draw_gain(width // head_dim, 1, spread=_QK_NORM_HEAD_SPREAD)
            dims = random.draw_gain(width // head_dim, head_dim, spread=_QK_NORM_SPREAD)
            return (_QK_NORM_MEAN * heads * dims).flatten()
        weight = self._stream.rms * random.draw_gain(width, spread=_NORM_SPREAD)
        weight[list(self._stream.channels)] = (
            self._stream.rms * _MASSIVE_AFTER_NORM / self._stream.mean_magnitude
        )
        return weight

    def _gate(self, name: str, *, shape: tuple[int, ...]) -> torch.Tensor:
        weight = _ROUTER_LOGIT_STD / math.sqrt(shape[1]) * self._random(name).draw_normal(*shape)
        if not self._spec.graph.has_correction_bias:
            # Massive channels are nearly constant: they would add the same to an expert's logit at each token.
            weight[:, list(self._stream.channels)] = 0.0
            return weight
        bias = self._correction_bias(
            name.replace(weight_names.GATE, weight_names.CORRECTION_BIAS), count=shape[0]
        )
        # In a trained model the bias compensates an expert's mean score. Here the massive channels, nearly constant,
        # give the experts their mean scores: each adds its equal part of an expert's offset to the logit.
        offset = (bias.mean() - bias) * _OFFSET_OF_BIAS / (_MASSIVE_AFTER_NORM * len(self._stream.channels))
        for channel, magnitude in self._stream.massive:
            weight[:, channel] = math.copysign(1, magnitude) * offset
        return weight

    def _correction_bias(self, name: str, *, count: int) -> torch.Tensor:
        random = self._random(name)
        low, high = _BIAS_CENTRES
        centre = low + (high - low) * random.draw_bytes(1)[0] / 255
        return (centre + _BIAS_STD * random.draw_normal(count)).clamp(*_BIAS_LIMITS)

    def _scales(self, name: str) -> torch.Tensor:
        return self._recipe(name).scales(self._random(weight_names.scale_name(name)))

    def _codes(self, name: str) -> torch.Tensor:
        recipe = self._recipe(name)
        codes = recipe.codes(self._random(name))
        if name.endswith(weight_names.O_PROJ):
            codes[list(self._stream.channels)] = self._massive_rows(name, recipe)
        return codes

    def _massive_rows(self, name: str, recipe: MatrixRecipe) -> torch.Tensor:
        """Return o_proj's rows of the massive channels as FP8 codes, which make these channels grow with the stream.

        The massive channels are nearly constant, so attn_context has a constant part: v_proj's columns of these
        channels. Rows equal to those columns add it up.
        """
        v_codes = self._codes(name.replace(weight_names.O_PROJ, weight_names.V_PROJ))
        heads: torch.Tensor = v_codes[:, list(self._stream.channels)].T.unflatten(
            1, (-1, self._spec.head_dim)
        )
        num_repeats = self._spec.num_attention_heads // self._spec.num_key_value_heads
        rows = heads.repeat_interleave(num_repeats, 1).flatten(1).contiguous().view(torch.float8_e4m3fn)
        # A block has one scale for these rows and for ordinary rows of gain 1, and the larger of the two sets it.
        share = recipe.row_gain[list(self._stream.channels)].clamp(max=1).float()
        return (rows.float() * share[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)

    def _recipe(self, name: str) -> MatrixRecipe:
        """Return the distribution of a linear layer of attention or of an expert."""
        layer = weight_names.layer_of(name) or 0
        gains = self._random(f"{name} gains")
        if name.endswith(weight_names.O_PROJ):
            return self._output_recipe(layer)
        if name.endswith((weight_names.Q_PROJ, weight_names.K_PROJ, weight_names.V_PROJ)):
            is_query = name.endswith(weight_names.Q_PROJ)
            num_heads = self._spec.num_attention_heads if is_query else self._spec.num_key_value_heads
            return self._projection_recipe(
                gains.draw_gain(num_heads, spread=_HEAD_SPREAD), self._spec.head_dim
            )
        if name.endswith(weight_names.INDEXER):
            sparsity = self._spec.graph.sparsity
            assert sparsity is not None, "only a sparse layer has an indexer"
            num_heads = sparsity.num_heads if name.endswith(weight_names.INDEXER[0]) else 1
            return self._projection_recipe(_ones(num_heads), sparsity.head_dim)
        # The part of the name before `.weight`: w1, w2 or w3, or what a whole MLP has in their place.
        matrix = name.split(".")[-2]
        gain = math.exp(_EXPERT_SPREAD * float(gains.draw_normal(1)))
        if weight_names.EXPERTS in name:
            return self._mlp_recipe(matrix, layer, self._spec.intermediate_size, gain)
        is_dense = name.endswith((weight_names.DENSE_GATE, weight_names.DENSE_UP, weight_names.DENSE_DOWN))
        width = self._spec.graph.dense_width if is_dense else self._spec.graph.shared_width
        return self._mlp_recipe(_OF_WHOLE_MLP[matrix], layer, width, gain, is_routed=False)

    def _projection_recipe(self, head_gain: torch.Tensor, head_dim: int) -> MatrixRecipe:
        return MatrixRecipe(
            std=1 / math.sqrt(self._spec.hidden_size),
            row_gain=head_gain.repeat_interleave(head_dim),
            num_columns=self._spec.hidden_size,
            block_spread=_BLOCK_SPREAD,
        )

    def _output_recipe(self, layer: int) -> MatrixRecipe:
        spec, stream = self._spec, self._stream
        std = _ATTENTION_SHARE * stream.rms * stream.median_channel(layer) / _CONTEXT_RMS
        std /= math.sqrt(spec.query_width)
        # The number that a row of gain 1, equal to v_proj's column (see `_massive_rows`), adds to its massive channel.
        added = spec.query_width * std * _MASSIVE_AFTER_NORM / math.sqrt(spec.hidden_size)
        row_gain = _ones(spec.hidden_size)
        wanted = _MASSIVE_LEAD * stream.growth * stream.mean_magnitude * stream.median_channel(layer)
        row_gain[list(stream.channels)] = wanted / added
        return MatrixRecipe(
            std=std, row_gain=row_gain, num_columns=spec.query_width, block_spread=_BLOCK_SPREAD
        )

    def _mlp_recipe(
        self, matrix: str, layer: int, width: int, gain: float, *, is_routed: bool = True
    ) -> MatrixRecipe:
        hidden_size = self._spec.hidden_size
        if matrix != weight_names.EXPERT_DOWN:
            std = (_GATE_STD if matrix == weight_names.EXPERT_GATE else _UP_STD) / math.sqrt(hidden_size)
            return MatrixRecipe(
                std=std * gain, row_gain=_ones(width), num_columns=hidden_size, block_spread=_BLOCK_SPREAD
            )
        # With weights of about 1/k, the sum over k experts is √k times smaller than one expert.
        std = _MOE_SHARE * self._stream.rms * self._stream.median_channel(layer) / _ACTIVATION_RMS
        std *= math.sqrt((self._spec.num_experts_per_tok if is_routed else 1) / width)
        return MatrixRecipe(
            std=std * gain, row_gain=_ones(hidden_size), num_columns=width, block_spread=_BLOCK_SPREAD
        )


def _ones(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.float64)
