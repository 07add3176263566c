"""Trial: one run of the port on generated weights, beside the reference layer, which clears or proves suspects.

It runs in float32 where the port and memory allow it, so that an error is a mistake and not noise. If the outputs
differ, repairs are tried until the output is right, each on top of the best one before. If no repair helps, the port
runs on weights that quantisation keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from minimax_tools.errors import TargetError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import EMBEDDING, expected_layer_shapes, layer_prefix
from minimax_tools.reference.float32_layer import Float32Layer
from minimax_tools.synthetic.random_weights import SyntheticWeights
from neuron.ports.port_errors import PortEndError
from neuron.weight_trace.generated_tensors import LazyTensors, Tensors
from neuron.weight_trace.quantisation import EXACT_VALUES, make_exact
from neuron.weight_trace.repairs import Repair

# Two rows show a mix-up of rows; 16 tokens show a wrong position, and reach most experts of a traced layer.
_BATCH_SIZE, _SEQUENCE_LENGTH = 2, 16
_SEED = 0
# Measured on the 12 experts of the tests: right ports are off by 2e-7 at most, the mildest mistake (INT8 gate) by 0.07.
_FLOAT32_LIMIT = 1e-3
# A port that computes in BF16 whatever it is built in is off by about 0.01 of the delta.
_BF16_LIMIT = 0.05
# Measured there: an unrelated repair leaves at least 0.93 of the error, the first of two right ones 0.35.
_MAX_ERROR_LEFT_BY_ONE = 0.8
# Measured there: a repaired scale leaves 0.004, as its factor is read in BF16; other repairs leave 1e-6.
_MAX_ERROR_LEFT_BY_ALL = 0.01
# Each one more costs a run for every candidate.
_MAX_REPAIRS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrialInput:
    """Input of both layers: hidden states [B,S,H] float32, mask [B,S] and positions [B,S]."""

    hidden_states: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPort:
    """A port that is built and can be run.

    Args:
        run: Converts and loads tensors, and returns the port's output [B,S,H].
        computes_in_bf16: True if the port holds BF16 although it was built in float32.
    """

    run: Callable[[Tensors, TrialInput], torch.Tensor]
    computes_in_bf16: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """Comparison of the port's output with the reference layer's.

    Args:
        error: ‖port − reference‖ / ‖reference's delta‖; None where the port could not run.
        limit: Largest error at which the outputs agree.
        repairs: Repairs with which they agree, where they do not without.
        kept_error: The error on weights that quantisation keeps; None where they were not tried.
        kept_as: The way of quantisation with that error, a key of `EXACT_VALUES`; None where none was tried.
        failure: Reason why the port could not run.
    """

    error: float | None
    limit: float
    repairs: tuple[Repair, ...] = ()
    repaired_error: float | None = None
    kept_error: float | None = None
    kept_as: str | None = None
    failure: str | None = None

    @property
    def is_right(self) -> bool:
        """True if the port's output agrees as it is."""
        return self.error is not None and self.error <= self.limit

    @property
    def is_quantised(self) -> bool:
        """True if it agrees on weights that quantisation keeps."""
        return self.kept_error is not None and self.kept_error <= self.limit


def run_trial(
    port: TrialPort, spec: ModelSpec, layer: int, candidates: Sequence[Repair], *, keeps_tensors: bool
) -> TrialOutcome:
    """Run the port on generated weights, and if it is wrong search for the repairs that make it right.

    Args:
        port: The port.
        spec: The traced model.
        layer: The layer.
        candidates: Repairs to try.
        keeps_tensors: True to keep the generated weights in memory; else each access makes them anew.
    """
    tensors, trial_input = _make_tensors(spec, layer), _make_input(spec)
    if keeps_tensors:
        tensors = dict(tensors)
    expected = _reference_output(spec, tensors, trial_input)

    def error_with(repairs: Sequence[Repair]) -> float:
        changed = tensors
        for repair in repairs:
            changed = repair.apply(changed)
        return _error_of(port.run(changed, trial_input), expected, trial_input)

    limit = _BF16_LIMIT if port.computes_in_bf16 else _FLOAT32_LIMIT
    try:
        error = error_with(())
    except PortEndError:
        raise
    except TargetError as failure:
        return TrialOutcome(error=None, limit=limit, failure=failure.found or failure.what)
    outcome = TrialOutcome(error=error, limit=limit)
    if outcome.is_right:
        return outcome
    found = _search_repairs(error_with, candidates, error=error, limit=limit)
    if found is not None:
        repairs, repaired_error = found
        return replace(outcome, repairs=repairs, repaired_error=repaired_error)
    for name, change in EXACT_VALUES.items():
        exact = make_exact(tensors, change)
        expected_of_exact = _reference_output(spec, exact, trial_input)
        kept_error = _error_of(port.run(exact, trial_input), expected_of_exact, trial_input)
        if outcome.kept_error is None or kept_error < outcome.kept_error:
            outcome = replace(outcome, kept_error=kept_error, kept_as=name)
        if outcome.is_quantised:
            break
    return outcome


def _search_repairs(
    error_with: Callable[[Sequence[Repair]], float],
    candidates: Sequence[Repair],
    *,
    error: float,
    limit: float,
) -> tuple[tuple[Repair, ...], float] | None:
    """Add the best repair again and again; return the repairs and the error they leave, None if it stays large."""
    chosen: tuple[Repair, ...] = ()
    left = error
    while len(chosen) < min(_MAX_REPAIRS, len(candidates)):
        errors = {
            index: error_with((*chosen, repair))
            for index, repair in enumerate(candidates)
            if repair not in chosen
        }
        best = min(errors, key=lambda index: errors[index])
        if errors[best] > max(limit, _MAX_ERROR_LEFT_BY_ONE * left):
            return None
        chosen, left = (*chosen, candidates[best]), errors[best]
        if left <= max(limit, _MAX_ERROR_LEFT_BY_ALL * error):
            return chosen, left
    return None


def _error_of(output: torch.Tensor, expected: torch.Tensor, trial_input: TrialInput) -> float:
    """Return the error of an output, relative to what the reference layer adds to its input; infinite for NaN."""
    error = (output.float() - expected).norm() / (expected - trial_input.hidden_states).norm()
    return float(error) if torch.isfinite(error) else float("inf")


def _make_tensors(spec: ModelSpec, layer: int) -> Tensors:
    """Make the weights of a layer that behaves as if trained: BF16 numbers in float32."""
    weights = SyntheticWeights(spec, seed=_SEED)
    shapes = expected_layer_shapes(spec)

    def make(name: str) -> torch.Tensor:
        parts = weights.make(layer_prefix(layer) + name, shape=shapes[name], dtype=torch.float32)
        return torch.cat(list(parts))

    return LazyTensors(shapes, make)


def _make_input(spec: ModelSpec) -> TrialInput:
    num_tokens = _BATCH_SIZE * _SEQUENCE_LENGTH
    shape = (min(spec.vocab_size, num_tokens), spec.hidden_size)
    rows = next(iter(SyntheticWeights(spec, seed=_SEED).make(EMBEDDING, shape=shape, dtype=torch.float32)))
    batch_shape = (_BATCH_SIZE, _SEQUENCE_LENGTH)
    return TrialInput(
        hidden_states=rows[torch.arange(num_tokens) % len(rows)].reshape(*batch_shape, spec.hidden_size),
        attention_mask=torch.ones(batch_shape, dtype=torch.int64),
        position_ids=torch.arange(_SEQUENCE_LENGTH).expand(batch_shape).clone(),
    )


def _reference_output(spec: ModelSpec, tensors: Tensors, trial_input: TrialInput) -> torch.Tensor:
    inputs = Inputs(
        input_ids=torch.zeros_like(trial_input.attention_mask),
        attention_mask=trial_input.attention_mask,
        position_ids=trial_input.position_ids,
        source="made hidden states",
    )
    sites = Float32Layer(spec, tensors).run(trial_input.hidden_states, inputs, router_experts=None)
    return sites[Site.OUTPUT]
