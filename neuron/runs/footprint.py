"""The host memory of a device run: its footprint, computed from shapes, and the limits that it must keep.

B batch, S sequence, T tokens (B·S), H hidden, N heads, E experts, C experts per chunk, I intermediate.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.read_ahead import stored_layer_bytes
from minimax_tools.machine.memory import MemoryBudget, available_bytes
from minimax_tools.machine.size import format_size
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import layer_bytes, vocabulary_bytes
from neuron.builtin.moe import CHUNK_SIZE_BYTES
from neuron.devices.backend import Backend
from neuron.devices.runtime import Runtime
from neuron.ports.exposure import site_shape
from neuron.runs.device_request import PortSetup

logger = logging.getLogger(__name__)

_FLOAT32_BYTES = 4
_FLOAT64_BYTES = 8
# A site's values: on the device, on the host, and as the bytes that are written.
_COPIES_OF_A_SITE = 3
# Scores, masked scores, and their softmax in two dtypes.
_COPIES_OF_SCORES = 4
# XLA on the CPU widens the weights of a running graph to float32 and transposes them: 3.5 times their bytes measured.
_XLA_COPIES_OF_EXPERTS = 4
# Threads and libraries: stacks, scratch memory, compiled code.
_SPARE_BYTES = 64 << 20
# The share of the free memory to plan with. The rest is for memory that no shape tells.
_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFootprint:
    """The host memory that a device run takes.

    Args:
        backend: The backend that computes. A NeuronCore holds its weights outside the host's memory.
        num_experts_at_once: Number of experts that mm2's own layer runs together. None for a port, whose tensors
            between the sites are unknown.
        num_ranks: Number of ranks that the weights are divided among, as far as known.
    """

    spec: ModelSpec
    dtype: torch.dtype
    inputs: Inputs
    backend: Backend
    num_experts_at_once: int | None
    num_ranks: int = 1

    @property
    def layer_bytes(self) -> int:
        """The weights of one layer or of a rank's part, and the chunk of them on its way to a device."""
        whole = -(-layer_bytes(self.spec, self.dtype) // self.num_ranks)
        held = 0 if self.backend.is_neuron else whole
        on_its_way = 0 if self.backend is Backend.CPU else min(whole, CHUNK_SIZE_BYTES)
        return held + on_its_way + _SPARE_BYTES

    @property
    def converted_bytes(self) -> int:
        """The tensors that a port's `convert_state_dict` returns."""
        return layer_bytes(self.spec, self.dtype)

    @property
    def vocabulary_bytes(self) -> int:
        """The embedding's weights; the lm_head takes as much."""
        return vocabulary_bytes(self.spec, self.dtype)

    @property
    def activation_bytes(self) -> int:
        """The activations of one layer: its sites and, for mm2's own layer, the tensors between them."""
        sizes = [math.prod(site_shape(site, self.spec, self.inputs.batch_shape)) for site in Site]
        sites = sum(sizes) * _COPIES_OF_A_SITE * self.dtype.itemsize + max(sizes) * 2 * _FLOAT64_BYTES
        return sites + self._bytes_between_sites + _SPARE_BYTES

    @property
    def logits_bytes(self) -> int:
        """The logits: on the device, on the host, as written bytes, and once in float64."""
        num_values = self.inputs.input_ids.numel() * self.spec.vocab_size
        return num_values * (_COPIES_OF_A_SITE * self.dtype.itemsize + _FLOAT64_BYTES)

    @property
    def _bytes_between_sites(self) -> int:
        """Attention scores; of the experts that run together, the states between matrices and copies of these."""
        if self.num_experts_at_once is None or self.backend.is_neuron:
            return 0
        pairs = self.inputs.batch_size * self.inputs.sequence_length**2
        scores = _COPIES_OF_SCORES * pairs * self.spec.num_attention_heads * _FLOAT32_BYTES
        hidden, intermediate = self.spec.hidden_size, self.spec.intermediate_size
        states = (4 * intermediate + hidden) * self.dtype.itemsize + 2 * hidden * _FLOAT32_BYTES
        matrices = 3 * hidden * intermediate * self.dtype.itemsize
        copies = _XLA_COPIES_OF_EXPERTS if self.backend.is_lazy else 0
        expert = self.inputs.input_ids.numel() * states + copies * matrices
        return scores + self.num_experts_at_once * expert


def device_footprint(setup: PortSetup, runtime: Runtime) -> DeviceFootprint:
    """Compute the footprint of a port's run, in each of its ranks."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Limits that stop a device run before it exceeds its memory budget.

    Each method raises MemoryBudgetError where the memory it names does not fit.

    Args:
        footprint: The memory that the run takes.
        budget: The memory that it may take.
    """

    footprint: DeviceFootprint
    budget: MemoryBudget

    def allow_layer(self, layer: int) -> None:
        """Require room for another layer's weights."""
        self.budget.require(self.footprint.layer_bytes, f"holding the weights of layer {layer}")

    def allow_conversion(self, layer: int, *, is_built_anew: bool) -> None:
        """Require room for a layer as the port converts it, beside a new module that is still to be filled."""
        module = self.footprint.layer_bytes if is_built_anew else 0
        needed = self.footprint.converted_bytes + module
        self.budget.require(needed, f"what convert_state_dict makes of layer {layer}")

    def allow_activations(self, layer: int) -> None:
        """Require room for a layer's activations."""
        self.budget.require(self.footprint.activation_bytes, f"what layer {layer} computes")

    def has_room_for_another_layer(self) -> bool:
        """Decide whether the host can hold another layer's weights beside the activations of the one that runs."""
        needed = self.footprint.converted_bytes + self.footprint.activation_bytes
        return needed <= free_bytes(self.budget)

    def allow_embedding(self) -> None:
        """Require room for the embedding's weights."""
        self.budget.require(self.footprint.vocabulary_bytes, "reading the embedding")

    def allow_head(self) -> None:
        """Require room for the lm_head and its logits."""
        footprint = self.footprint
        # For a NeuronCore too, the weight is read whole before it is sent.
        copies = 2 if footprint.backend is Backend.XLA_CPU else 1
        self.budget.require(
            copies * footprint.vocabulary_bytes + footprint.logits_bytes, "the lm_head and its logits"
        )


def free_bytes(budget: MemoryBudget) -> int:
    """Return the memory to plan with: what the budget leaves, or without one a share of the machine's free memory."""
    left = budget.left_bytes
    return int(available_bytes() * _SHARE) if left is None else left


def choose_read_ahead(prefetch: bool | None, footprint: DeviceFootprint, index: TensorIndex) -> bool:
    """Decide whether the next layer is read from the disk while one runs; log why where memory forbids it.

    Args:
        prefetch: The user's choice; None to decide by the free memory.
        footprint: The memory that the run takes.
        index: The checkpoint's.
    """
    if prefetch is not None:
        return prefetch
    # The page cache then holds the bytes of the layer that is being loaded, and of the next one.
    cached = 2 * max((stored_layer_bytes(index, layer) for layer in index.layers), default=0)
    needed = footprint.layer_bytes + footprint.activation_bytes + cached
    free = int(available_bytes() * _SHARE)
    if needed <= free:
        return True
    logger.info(
        "No layer is read ahead: a layer and two more in the system's cache take %s, %s are free.",
        format_size(needed),
        format_size(free),
    )
    return False
