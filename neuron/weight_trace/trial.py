"""Trial: the port runs on generated weights beside the reference layer, to prove or clear the mistakes suspected.

It is in float32 if the port and memory allow it: then an error is a mistake and not noise. If the outputs differ,
repairs are tried, each on top of the best ones before. If none helps, the port runs on weights that quantisation keeps:
there a port that quantises on purpose is right, and a port with a mistake is wrong.

- FP8: plus or minus a power of two. It is exact under the scale of a block, of a row, or of several matrices.
- INT8: whole numbers from -127 to 127 times a power of two, with ±127 in every group that may get a scale.

The power of two changes from block to block (FP8, INT8) or from row to row (INT8), so a scale taken from another place
shows as an error. R rows and C columns of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch

from minimax_tools.errors import TargetError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.quantisation import BLOCK_SIZE
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    ATTENTION_MATRICES,
    DENSE_DOWN,
    DENSE_GATE,
    DENSE_UP,
    EMBEDDING,
    EXPERTS,
    SHARED_DOWN,
    SHARED_GATE,
    SHARED_UP,
    expected_layer_shapes,
    layer_prefix,
)
from minimax_tools.reference.evaluation import Float32Layer
from minimax_tools.synthetic.random_weights import SyntheticWeights
from neuron.ports.target import PortEndError
from neuron.weight_trace.repairs import Repair
from neuron.weight_trace.source_tensors import LazyTensors, Tensors

# Three different powers: the blocks to the right, below, and at the transposed place all have another one.
_NUM_POWERS = 3
_MAX_INT8 = 127.0
# Standard deviations at which codes reach 127: beyond lie 0.3 % of normal weights, which are clamped.
_NUM_DEVIATIONS = 3.0
# Ports take one INT8 scale for this many neighbours of a row, or for a multiple of it.
_GROUP_SIZE = 32


def make_exact(tensors: Tensors, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    """Return a layer's tensors, with those that ports quantise changed by one of `EXACT_VALUES`, each made on access.

    Signs stay, magnitudes do not.
    """
    return LazyTensors(tensors, lambda name: change(tensors[name]) if _is_quantised(name) else tensors[name])


_QUANTISED = frozenset(
    (*ATTENTION_MATRICES, SHARED_GATE, SHARED_UP, SHARED_DOWN, DENSE_GATE, DENSE_UP, DENSE_DOWN)
)


def _is_quantised(name: str) -> bool:
    return name in _QUANTISED or EXPERTS in name


def _exact_fp8(matrix: torch.Tensor) -> torch.Tensor:
    """Return plus or minus one power of two, divided by 1, 2 or 4 block by block."""
    size = torch.exp2(matrix.std().log2().round())
    return torch.where(matrix < 0, -size, size) * torch.exp2(-_powers_by_block(matrix))


def _exact_int8(matrix: torch.Tensor, powers: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return whole numbers [R,C] with ±127 in every group of a row, times powers of two."""
    reach = _NUM_DEVIATIONS * matrix.std()
    # ±127 is kept for the largest code of each group, below.
    codes = (matrix / reach * _MAX_INT8).round().clamp(1.0 - _MAX_INT8, _MAX_INT8 - 1.0)
    # All matrices of this width have the same unit: ports quantise several of them side by side.
    unit = 2.0 ** round(math.log2(_NUM_DEVIATIONS / _MAX_INT8 / math.sqrt(matrix.shape[1])))
    for group in codes.split(_GROUP_SIZE, dim=1):
        largest = group.abs().argmax(dim=1, keepdim=True)
        signs = torch.where(group.gather(1, largest) < 0, -1.0, 1.0)
        group.scatter_(1, largest, signs * _MAX_INT8)
    return codes * unit * torch.exp2(-powers(matrix))


def _powers_by_block(matrix: torch.Tensor) -> torch.Tensor:
    """Return powers [R,C] that differ between neighbouring blocks, and between a grid of blocks and its transpose."""
    rows, columns = (torch.arange(length) // BLOCK_SIZE for length in matrix.shape)
    return ((rows[:, None] + 2 * columns[None, :]) % _NUM_POWERS).float()


def _powers_by_row(matrix: torch.Tensor) -> torch.Tensor:
    """Return powers [R,1] that differ between neighbouring rows."""
    return (torch.arange(matrix.shape[0]) % _NUM_POWERS).float()[:, None]


# Ways to quantise, and the function that makes a matrix exact in each. Values exact in one way are not in the others.
EXACT_VALUES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "FP8": _exact_fp8,
        "INT8 with a scale for each row": partial(_exact_int8, powers=_powers_by_row),
        "INT8 with a scale for each block": partial(_exact_int8, powers=_powers_by_block),
    }
)


# Two rows show a mix-up of rows; 16 tokens show a wrong position, and reach most experts of a traced layer.
_BATCH_SIZE, _SEQUENCE_LENGTH = 2, 16
_SEED = 0
# The errors below were measured on the ports and mistakes of tests/neuron/weight_trace/test_inspection.py, relative to
# the reference layer's delta (its output minus its input).
# Right ports are off by 2e-7 at most, the port with the mildest mistake (an INT8 gate) by 0.07.
_FLOAT32_LIMIT = 1e-3
# Right ports that compute in BF16 are off by about 0.01.
_BF16_LIMIT = 0.05
# Share of the error that one more repair may leave: an unrelated repair leaves at least 0.93, the first of two right
# ones 0.35.
_MAX_ERROR_LEFT_BY_ONE = 0.8
# Share of the first error that all repairs may leave: a repaired scale leaves 0.004, as its factor is read in BF16;
# other repairs leave 1e-6.
_MAX_ERROR_LEFT_BY_ALL = 0.01
# Every repair added costs a run for each candidate that remains.
_MAX_REPAIRS = 3


# Converts and loads tensors, and returns the port's output [B,S,H] for float32 hidden states [B,S,H] and their mask and
# positions; raises TargetError if the port fails. The last argument names port tensors to overwrite once the port is
# loaded, each with the tensor to write there.
RunPort = Callable[[Tensors, torch.Tensor, Inputs, Mapping[str, str]], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """Comparison of the port's output with the reference layer's."""

    error: float | None  # ‖port − reference‖ / ‖reference's delta‖; None if the port could not run
    limit: float  # largest error at which the outputs agree
    # Repairs that make the outputs agree; empty if none was needed or none helped.
    repairs: tuple[Repair, ...] = ()
    repaired_error: float | None = None  # the error with all repairs; None without repairs
    # The error once the tensors that never got their weights hold them; None if that was not tried.
    refilled_error: float | None = None
    # Repairs that take away a part of the error, not all of it, and the error with them; empty and None without any.
    partial_repairs: tuple[Repair, ...] = ()
    partial_error: float | None = None
    # Lowest error on weights that quantisation keeps; None if they were not tried.
    exact_error: float | None = None
    # The way of quantisation with that error, a key of `EXACT_VALUES`; None if none was tried.
    exact_in: str | None = None
    failure: str | None = None  # reason why the port could not run; None if it ran

    @property
    def has_run(self) -> bool:
        """True if the port could run."""
        return self.error is not None

    @property
    def is_right(self) -> bool:
        """True if the port's output agrees as it is."""
        return self.error is not None and self.error <= self.limit

    @property
    def is_right_if_refilled(self) -> bool:
        """True if the output agrees once the tensors that never got their weights hold them."""
        return self.refilled_error is not None and self.refilled_error <= self.limit

    @property
    def is_quantised(self) -> bool:
        """True if the port's output agrees on weights that quantisation keeps."""
        return self.exact_error is not None and self.exact_error <= self.limit


def run_trial(
    run: RunPort,
    spec: ModelSpec,
    layer: int,
    candidates: Sequence[Repair],
    *,
    computes_in_bf16: bool,
    keeps_tensors: bool,
    refills: Mapping[str, str] = MappingProxyType({}),
) -> TrialOutcome:
    """Run the port on generated weights, and if it is wrong search for the `candidates` that make it right.

    `computes_in_bf16` tells of BF16 parameters in the port. `keeps_tensors` keeps the generated weights in memory.
    `refills` are port tensors that never got their weights, each with the weight's name: if the output is wrong they
    get it, and repairs are searched for what is left.

    Raises:
        PortEndError: The port tried to exit, or ran out of memory.
    """
    tensors, trial = _make_tensors(spec, layer), _Trial(run, spec)
    if keeps_tensors:
        tensors = dict(tensors)
    expected = trial.expect(tensors)
    limit = _BF16_LIMIT if computes_in_bf16 else _FLOAT32_LIMIT
    try:
        error = trial.error(tensors, expected)
    except PortEndError:
        raise
    except TargetError as failure:
        return TrialOutcome(error=None, limit=limit, failure=failure.found or failure.what)
    outcome = TrialOutcome(error=error, limit=limit)
    if outcome.is_right:
        return outcome
    if refills:
        trial.refills = refills
        error = trial.error_or_infinity(tensors, expected)
        outcome = replace(outcome, refilled_error=error)
        if outcome.is_right_if_refilled:
            return outcome

    def error_with(repairs: Sequence[Repair]) -> float:
        repaired = tensors
        for repair in repairs:
            repaired = repair.apply(repaired)
        return trial.error_or_infinity(repaired, expected)

    repairs, error_left, is_enough = _search_repairs(error_with, candidates, error=error, limit=limit)
    if is_enough:
        return replace(outcome, repairs=repairs, repaired_error=error_left)
    if repairs:
        outcome = replace(outcome, partial_repairs=repairs, partial_error=error_left)
    return _try_exact_values(outcome, trial, tensors)


def _search_repairs(
    error_with: Callable[[Sequence[Repair]], float],
    candidates: Sequence[Repair],
    *,
    error: float,
    limit: float,
) -> tuple[tuple[Repair, ...], float, bool]:
    """Add the best repair again and again; return the repairs, the error they leave, and whether it is small enough.

    `error_with` runs the port with repairs and returns its error; `error` is that without any.
    """
    # If the output is NaN or Inf, the error is infinite, and so is any share of it: then only the limit counts.
    largest_final_error = max(limit, _MAX_ERROR_LEFT_BY_ALL * error) if math.isfinite(error) else limit
    remaining = list(candidates)
    chosen: tuple[Repair, ...] = ()
    error_left = error
    while remaining and len(chosen) < _MAX_REPAIRS:
        errors = [error_with((*chosen, repair)) for repair in remaining]
        lowest = min(errors)
        if not math.isfinite(lowest) or lowest > max(limit, _MAX_ERROR_LEFT_BY_ONE * error_left):
            break
        chosen, error_left = (*chosen, remaining.pop(errors.index(lowest))), lowest
        if error_left <= largest_final_error:
            return chosen, error_left, True
    return chosen, error_left, False


def _try_exact_values(outcome: TrialOutcome, trial: _Trial, tensors: Tensors) -> TrialOutcome:
    """Run the port on weights that quantisation keeps; add the lowest error, and its way of quantisation."""
    for name, change in EXACT_VALUES.items():
        exact = make_exact(tensors, change)
        error = trial.error_or_infinity(exact, trial.expect(exact))
        if outcome.exact_error is None or error < outcome.exact_error:
            outcome = replace(outcome, exact_error=error, exact_in=name)
        if outcome.is_quantised:
            break
    return outcome


class _Trial:
    """The port beside the reference layer, on one input; `refills` are those of `run_trial`."""

    def __init__(self, run: RunPort, spec: ModelSpec) -> None:
        self._run = run
        self._spec = spec
        self._hidden_states, self._inputs = _make_input(spec)
        self.refills: Mapping[str, str] = {}

    def expect(self, tensors: Tensors) -> torch.Tensor:
        """Return the reference layer's output [B,S,H]."""
        layer = Float32Layer(self._spec, tensors)
        return layer.run(self._hidden_states, self._inputs, router_experts=None)[Site.OUTPUT]

    def error(self, tensors: Tensors, expected: torch.Tensor) -> float:
        """Return ‖port − expected‖ relative to the reference layer's delta; infinite for NaN or Inf."""
        output = self._run(tensors, self._hidden_states, self._inputs, self.refills)
        error = (output.float() - expected).norm() / (expected - self._hidden_states).norm()
        return float(error) if torch.isfinite(error) else float("inf")

    def error_or_infinity(self, tensors: Tensors, expected: torch.Tensor) -> float:
        """Return the error on changed weights; infinite if the port refuses them."""
        try:
            return self.error(tensors, expected)
        except PortEndError:
            raise
        except TargetError:
            # It ran on the weights as they were: these changed weights are not what it needs.
            return float("inf")


def _make_tensors(spec: ModelSpec, layer: int) -> Tensors:
    """Make the weights of a layer that behaves as if trained: BF16 numbers in float32."""
    weights = SyntheticWeights(spec, seed=_SEED)
    shapes = expected_layer_shapes(spec, layer)

    def make(name: str) -> torch.Tensor:
        # Only embedding and head are made in several blocks.
        (whole,) = weights.make(layer_prefix(layer) + name, shape=shapes[name], dtype=torch.float32)
        return whole

    return LazyTensors(shapes, make)


def _make_input(spec: ModelSpec) -> tuple[torch.Tensor, Inputs]:
    """Make hidden states [B,S,H], float32, and the inputs of so many tokens without padding."""
    num_tokens = _BATCH_SIZE * _SEQUENCE_LENGTH
    shape = (min(spec.vocab_size, num_tokens), spec.hidden_size)
    weights = SyntheticWeights(spec, seed=_SEED)
    rows = torch.cat(list(weights.make(EMBEDDING, shape=shape, dtype=torch.float32)))
    batch_shape = (_BATCH_SIZE, _SEQUENCE_LENGTH)
    inputs = Inputs(
        input_ids=torch.zeros(batch_shape, dtype=torch.int64),
        attention_mask=torch.ones(batch_shape, dtype=torch.int64),
        position_ids=torch.arange(_SEQUENCE_LENGTH).expand(batch_shape).clone(),
        source="generated hidden states",
    )
    return rows[torch.arange(num_tokens) % len(rows)].reshape(*batch_shape, spec.hidden_size), inputs
