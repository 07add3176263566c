"""DeviceFootprint: what a device run takes of the host's memory, told from shapes; and the limits it is held to.

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
from minimax_tools.machine.size import word_size
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import layer_bytes, vocabulary_bytes
from neuron.builtin.moe import CHUNK_SIZE_BYTES
from neuron.devices.backend import Backend
from neuron.devices.runtime import Runtime
from neuron.ports.exposure import site_shape
from neuron.ports.target import Target

logger = logging.getLogger(__name__)

_FLOAT32_BYTES = 4
_FLOAT64_BYTES = 8
# A site's values: on the device, on the host, and as the bytes that are written.
_COPIES_OF_A_SITE = 3
# Scores, scores that are masked, and their softmax in two dtypes.
_COPIES_OF_SCORES = 4
# XLA on the CPU widens the weights of a running graph to float32 and transposes them: at most 3.5 times their bytes
# were measured.
_XLA_COPIES_OF_EXPERTS = 4
# What threads and libraries take for themselves: stacks, scratch, code that is compiled.
_SPARE_BYTES = 64 << 20
# Of the free memory, what is planned with: the rest is for what no shape tells.
_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFootprint:
    """What a device run holds in the host's memory.

    Args:
        spec: The model.
        dtype: Of weights and activations.
        inputs: The token rows.
        backend: What computes: the weights that a NeuronCore computes with are not in the host's memory.
        num_experts_at_once: How many experts mm2's own layers run together. None for a port: no shape tells what
            lies between its sites.
        num_ranks: Among how many ranks the weights are divided, as far as that is known.
    """

    spec: ModelSpec
    dtype: torch.dtype
    inputs: Inputs
    backend: Backend
    num_experts_at_once: int | None
    num_ranks: int = 1

    @property
    def layer_bytes(self) -> int:
        """The weights of one layer, or a rank's part of them, and what of them is on its way to a device."""
        whole = -(-layer_bytes(self.spec, self.dtype) // self.num_ranks)
        held = 0 if self.backend.is_neuron else whole
        on_its_way = 0 if self.backend is Backend.CPU else min(whole, CHUNK_SIZE_BYTES)
        return held + on_its_way + _SPARE_BYTES

    @property
    def converted_bytes(self) -> int:
        """What a port's `convert_state_dict` returns."""
        return layer_bytes(self.spec, self.dtype)

    @property
    def vocabulary_bytes(self) -> int:
        """The embedding's weights; the lm_head takes as much."""
        return vocabulary_bytes(self.spec, self.dtype)

    @property
    def activation_bytes(self) -> int:
        """What one layer takes beside its weights: its sites, and, of mm2's own layer, what lies between them."""
        sizes = [math.prod(site_shape(site, self.spec, self.inputs.batch_shape)) for site in Site]
        sites = sum(sizes) * _COPIES_OF_A_SITE * self.dtype.itemsize + max(sizes) * 2 * _FLOAT64_BYTES
        return sites + self._scores_bytes + self._experts_bytes + _SPARE_BYTES

    @property
    def logits_bytes(self) -> int:
        """What the logits take: on the device, on the host, as written bytes, and once in float64."""
        num_values = self.inputs.input_ids.numel() * self.spec.vocab_size
        return num_values * (_COPIES_OF_A_SITE * self.dtype.itemsize + _FLOAT64_BYTES)

    @property
    def _scores_bytes(self) -> int:
        if self.num_experts_at_once is None or self.backend.is_neuron:
            return 0
        pairs = self.inputs.batch_size * self.inputs.sequence_length**2
        return _COPIES_OF_SCORES * pairs * self.spec.num_attention_heads * _FLOAT32_BYTES

    @property
    def _experts_bytes(self) -> int:
        """What experts that run together take: the states between their matrices, and copies of these."""
        if self.num_experts_at_once is None or self.backend.is_neuron:
            return 0
        hidden, intermediate = self.spec.hidden_size, self.spec.intermediate_size
        states = (4 * intermediate + hidden) * self.dtype.itemsize + 2 * hidden * _FLOAT32_BYTES
        matrices = 3 * hidden * intermediate * self.dtype.itemsize
        copies = _XLA_COPIES_OF_EXPERTS if self.backend.is_lazy else 0
        return self.num_experts_at_once * (self.inputs.input_ids.numel() * states + copies * matrices)


def device_footprint(
    target: Target, spec: ModelSpec, *, dtype: torch.dtype, inputs: Inputs, runtime: Runtime
) -> DeviceFootprint:
    """What a run of that target takes of the host's memory, in each of its ranks."""
    return DeviceFootprint(
        spec=spec,
        dtype=dtype,
        inputs=inputs,
        backend=runtime.backend,
        num_experts_at_once=target.num_experts_at_once(
            spec, dtype=dtype, is_lazy=runtime.backend.is_lazy, ranks=runtime.ranks
        ),
        num_ranks=runtime.ranks.degree if target.divides_weights else 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Stops a device run before it takes more memory than it may.

    Args:
        footprint: What the run takes.
        budget: What it may take.
    """

    footprint: DeviceFootprint
    budget: MemoryBudget

    def allow_layer(self, layer: int) -> None:
        """Pass where another layer's weights fit.

        Raises:
            MemoryBudgetError: They do not.
        """
        self.budget.require(self.footprint.layer_bytes, f"holding the weights of layer {layer}")

    def allow_conversion(self, layer: int, *, is_built_anew: bool) -> None:
        """Pass where a layer fits once more, as the port converts it, beside a module that is still to be filled.

        Raises:
            MemoryBudgetError: It does not.
        """
        module = self.footprint.layer_bytes if is_built_anew else 0
        needed = self.footprint.converted_bytes + module
        self.budget.require(needed, f"what convert_state_dict makes of layer {layer}")

    def allow_activations(self, layer: int) -> None:
        """Pass where what a layer computes fits.

        Raises:
            MemoryBudgetError: It does not.
        """
        self.budget.require(self.footprint.activation_bytes, f"what layer {layer} computes")

    def has_room_for_another_layer(self) -> bool:
        """Whether the host can hold the weights of one more layer beside what the one that runs computes."""
        left = self.budget.left_bytes
        free = int(available_bytes() * _SHARE) if left is None else left
        return self.footprint.converted_bytes + self.footprint.activation_bytes <= free

    def allow_embedding(self) -> None:
        """Pass where the embedding's weights fit.

        Raises:
            MemoryBudgetError: They do not.
        """
        self.budget.require(self.footprint.vocabulary_bytes, "reading the embedding")

    def allow_head(self) -> None:
        """Pass where the lm_head and its logits fit.

        Raises:
            MemoryBudgetError: They do not.
        """
        footprint = self.footprint
        # Where a NeuronCore computes too: the weight is read whole before it is sent.
        copies = 2 if footprint.backend is Backend.XLA_CPU else 1
        self.budget.require(
            copies * footprint.vocabulary_bytes + footprint.logits_bytes, "the lm_head and its logits"
        )


def choose_read_ahead(prefetch: bool | None, footprint: DeviceFootprint, index: TensorIndex) -> bool:
    """Whether the next layer is fetched while one runs; the reason is logged where it is not.

    Args:
        prefetch: What the user said; None for where memory holds it.
        footprint: What the run takes.
        index: Of the checkpoint.
    """
    if prefetch is not None:
        return prefetch
    # What is fetched lies in the system's page cache: of the layer that is being loaded, and of the next.
    cached = 2 * max((stored_layer_bytes(index, layer) for layer in index.layers), default=0)
    needed = footprint.layer_bytes + footprint.activation_bytes + cached
    free = int(available_bytes() * _SHARE)
    if needed <= free:
        return True
    logger.info(
        "No layer is read ahead: a layer and two more in the system's cache take %s, %s are free.",
        word_size(needed),
        word_size(free),
    )
    return False
