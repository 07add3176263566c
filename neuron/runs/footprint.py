"""DeviceFootprint: the host memory that a device run takes, computed from shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import layer_bytes, vocabulary_bytes
from neuron.builtin.moe import CHUNK_SIZE_BYTES
from neuron.devices.backend import Backend
from neuron.devices.runtime import Runtime
from neuron.ports.exposure import site_shape
from neuron.runs.device_request import PortSetup

_FLOAT32_BYTES = 4
_FLOAT64_BYTES = 8
# A site's values of one call on the device; of all calls on the host, and as the bytes that are written.
_COPIES_OF_A_SITE = 3
_COPIES_ON_HOST = 2
# Scores, masked scores, and their softmax in two dtypes.
_COPIES_OF_SCORES = 4
# XLA on the CPU widens the weights of a running graph to float32 and transposes them: up to 3.5 times their bytes were
# measured, rounded up here.
_XLA_COPIES_OF_EXPERTS = 4
# Room for threads and libraries: stacks, scratch memory, compiled code. More refuses runs that would fit.
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFootprint:
    """The host memory that a device run takes."""

    spec: ModelSpec
    dtype: torch.dtype  # dtype of weights and activations
    inputs: Inputs  # the token rows of the run
    backend: Backend  # the backend that computes
    # Number of experts that mm2's own layer runs together; None for a port: its tensors between the sites are unknown.
    num_experts_at_once: int | None
    num_ranks: int = 1  # number of ranks known to divide the weights; 1 if each may hold them whole

    @property
    def loaded_layer_bytes(self) -> int:
        """The weights of one layer, or of a rank's part of it, where they are held and on their way there."""
        weight_bytes = math.ceil(layer_bytes(self.spec, self.dtype) / self.num_ranks)
        # A NeuronCore holds weights in its own memory.
        held_bytes = 0 if self.backend.is_neuron else weight_bytes
        # Weights for a device go through host buffers, at most a chunk of experts each. The CPU needs no buffers.
        sent_bytes = 0 if self.backend is Backend.CPU else min(weight_bytes, CHUNK_SIZE_BYTES)
        return held_bytes + sent_bytes + _SPARE_BYTES

    @property
    def converted_bytes(self) -> int:
        """The tensors that a port's `convert_state_dict` returns, if it does not leave them to be read in place."""
        return layer_bytes(self.spec, self.dtype)

    @property
    def embedding_bytes(self) -> int:
        """The embedding's weights."""
        return vocabulary_bytes(self.spec, self.dtype)

    @property
    def activation_bytes(self) -> int:
        """The activations of one layer: its sites and, for mm2's own layer, the tensors between them."""
        num_values = [math.prod(site_shape(site, self.spec, self.inputs.batch_shape)) for site in Site]
        num_in_call = sum(num_values) * self._rows_of_call // self.inputs.batch_size
        site_bytes = (num_in_call + sum(num_values) * _COPIES_ON_HOST) * self.dtype.itemsize
        # Room for two copies of the largest site in float64.
        scratch_bytes = max(num_values) * 2 * _FLOAT64_BYTES
        return site_bytes + scratch_bytes + self._bytes_between_sites + _SPARE_BYTES

    @property
    def head_bytes(self) -> int:
        """The lm_head's weight and the logits: on the device, on the host, as written bytes, and once in float64."""
        # XLA on the CPU copies the weight. A NeuronCore holds its own, but the host reads it whole before.
        num_copies = 2 if self.backend is Backend.XLA_CPU else 1
        num_logits = self.inputs.input_ids.numel() * self.spec.vocab_size
        logits_bytes = num_logits * (_COPIES_OF_A_SITE * self.dtype.itemsize + _FLOAT64_BYTES)
        return num_copies * vocabulary_bytes(self.spec, self.dtype) + logits_bytes

    @property
    def _rows_of_call(self) -> int:
        """The number of rows in one call of the layer."""
        return len(self.inputs.plan_calls()[0])

    @property
    def _bytes_between_sites(self) -> int:
        """Attention scores, and what the experts that run together compute and copy; 0 where unknown or on a device."""
        if self.num_experts_at_once is None or self.backend.is_neuron:
            return 0
        num_tokens = self._rows_of_call * self.inputs.sequence_length
        num_pairs = num_tokens * self.inputs.sequence_length
        score_bytes = _COPIES_OF_SCORES * num_pairs * self.spec.num_attention_heads * _FLOAT32_BYTES
        hidden, intermediate = self.spec.hidden_size, self.spec.intermediate_size
        # Per token: gate, up, SiLU of gate, and their product; the output, widened to float32, and weighted.
        token_bytes = (4 * intermediate + hidden) * self.dtype.itemsize + 2 * hidden * _FLOAT32_BYTES
        # Gate, up and down.
        weight_bytes = 3 * hidden * intermediate * self.dtype.itemsize
        num_copies = _XLA_COPIES_OF_EXPERTS if self.backend.is_lazy else 0
        expert_bytes = num_tokens * token_bytes + num_copies * weight_bytes
        return score_bytes + self.num_experts_at_once * expert_bytes


def device_footprint(setup: PortSetup, runtime: Runtime) -> DeviceFootprint:
    """Compute the footprint of a port's run, the same in each of its ranks."""
    return DeviceFootprint(
        spec=setup.spec,
        dtype=setup.dtype,
        inputs=setup.inputs,
        backend=runtime.backend,
        num_experts_at_once=setup.target.num_experts_at_once(
            setup.spec, dtype=setup.dtype, is_lazy=runtime.backend.is_lazy, ranks=runtime.ranks
        ),
        num_ranks=runtime.ranks.degree if setup.target.divides_weights else 1,
    )
