"""The memory that a golden takes, whole or streamed, computed from shapes before anything is read.

B batch, S sequence, T tokens (B·S), H hidden, N heads, K kv heads, D head_dim, E experts, k experts per token,
I intermediate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from minimax_tools.model.inputs import Inputs
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import layer_bytes, vocabulary_bytes
from minimax_tools.partition.node import Stage

# Layers' worth of memory that loading holds beside the layers loaded: the experts of one layer before they are stacked.
# Loading a model of one layer took 1.8 times the layer.
_LOADING_LAYERS = 0.8
# One FP8 byte, and a share of the float32 scale of a block of 128 × 128 weights.
_FP8_BYTES_PER_WEIGHT = 1 + 4 / 128**2
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The memory of a golden, in bytes."""

    spec: ModelSpec
    num_layers: int  # number of layers that run
    dtype: torch.dtype  # dtype of weights and activations
    inputs: Inputs
    keeps_logits: bool  # whether the logits of every position are captured
    attn_implementation: str
    experts_implementation: str
    floor_variants: tuple[str, ...] = ()  # names of the variants that run after each layer, all at once

    @property
    def layer_bytes(self) -> int:
        """Bytes of the weights of one layer."""
        return layer_bytes(self.spec, self.dtype)

    @property
    def packed_layer_bytes(self) -> int:
        """Bytes of the weights of one layer with its experts in FP8."""
        # Gate, up and down.
        experts = 3 * self.spec.num_local_experts * self.spec.intermediate_size * self.spec.hidden_size
        return self.layer_bytes - experts * self.dtype.itemsize + math.ceil(experts * _FP8_BYTES_PER_WEIGHT)

    def streamed_bytes(self, *, prefetch: bool, packed: bool) -> int:
        """Return the bytes of weights in memory while layers are streamed: one layer, or two with prefetch."""
        return (2 if prefetch else 1) * (self.packed_layer_bytes if packed else self.layer_bytes)

    def held_bytes(self, stage: Stage, *, packed: bool) -> int:
        """Return the memory of a slice that is held whole: weights, and sites until they are written."""
        weights = self.packed_layer_bytes if packed else self.layer_bytes
        vocabulary = self.vocabulary_bytes * (stage.has_embedding + stage.has_head)
        return len(stage.layers) * (weights + self.site_values * self.dtype.itemsize) + vocabulary

    @property
    def vocabulary_bytes(self) -> int:
        """Bytes of the weights of the embedding; the lm_head has as many."""
        return vocabulary_bytes(self.spec, self.dtype)

    @property
    def loading_bytes(self) -> int:
        """Peak of memory while the model is loaded whole."""
        layers = self.layer_bytes * (self.num_layers + _LOADING_LAYERS)
        # Twice: the embedding, and the lm_head.
        return int(layers) + 2 * self.vocabulary_bytes

    @property
    def activation_bytes(self) -> int:
        """The memory of one layer beside its weights: sites, float32 twins, variants and temporaries."""
        spec = self.spec
        # As captured; in float32 the twin, the error, and the error again, split into ordinary and massive channels.
        sites = self.site_values * (self.dtype.itemsize + 3 * _FLOAT32_BYTES)
        # Float32 weights of the twin: one attention matrix at a time, and the router. Experts come in blocks.
        twin = (spec.query_width + spec.num_local_experts) * spec.hidden_size * _FLOAT32_BYTES
        return sites + self._expert_bytes + self._score_bytes + twin + self._variant_bytes

    @property
    def logits_bytes(self) -> int:
        """The logits, their twin and their errors; 0 if they are not captured."""
        if not self.keeps_logits:
            return 0
        num_values = self.inputs.input_ids.numel() * self.spec.vocab_size
        # The logits on device and host; in float32 the twin, and the error of all, ordinary and massive channels.
        return num_values * (2 * self.dtype.itemsize + 4 * _FLOAT32_BYTES)

    @property
    def site_values(self) -> int:
        """The number of values in all sites of a layer."""
        spec = self.spec
        # Most sites are as wide as the residual stream, the queries or the keys; the router has one value for each
        # expert, and two (number and weight) for each chosen one.
        width = (
            7 * spec.hidden_size
            + 4 * spec.query_width
            + 5 * spec.key_value_width
            + spec.num_local_experts
            + 2 * spec.num_experts_per_tok
        )
        return self.inputs.input_ids.numel() * width

    @property
    def _variant_bytes(self) -> int:
        """The memory of all variants at once: sites, expert states and attention scores."""
        num_variants = len(self.floor_variants)
        spec = self.spec
        num_routed = self.inputs.input_ids.numel() * spec.num_experts_per_tok
        experts = num_routed * (2 * spec.hidden_size + 3 * spec.intermediate_size)
        if not num_variants:
            return 0
        # Once for all variants: one float32 weight, and the scores of a block of heads with their random steps.
        shared = spec.query_width * spec.hidden_size + 4 * self.inputs.input_ids.shape[1] ** 2
        return (num_variants * (self.site_values + experts) + shared) * _FLOAT32_BYTES

    @property
    def _expert_bytes(self) -> int:
        spec = self.spec
        num_routed = self.inputs.input_ids.numel() * spec.num_experts_per_tok
        # Each routed token is gathered, goes through gate and up, and is scattered back.
        states = num_routed * (2 * spec.hidden_size + 3 * spec.intermediate_size) * _FLOAT32_BYTES
        if self.experts_implementation != "batched_mm":
            return states
        # batched_mm gathers the weights for each routed token.
        return states + num_routed * 3 * spec.hidden_size * spec.intermediate_size * self.dtype.itemsize

    @property
    def _score_bytes(self) -> int:
        """The memory of attention for every pair of tokens: the mask and, if eager, the scores of all heads."""
        batch, sequence = self.inputs.input_ids.shape
        num_pairs = batch * sequence**2
        if self.attn_implementation != "eager":
            return num_pairs * _FLOAT32_BYTES
        # Scores, their float32 softmax, and the softmax rounded.
        scores = self.spec.num_attention_heads * (2 * self.dtype.itemsize + _FLOAT32_BYTES)
        return num_pairs * (scores + _FLOAT32_BYTES)
