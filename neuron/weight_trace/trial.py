"""Trial: the port run once on made weights, beside the reference layer; what clears a suspect, or proves it.

Everything runs in float32 where the port and the memory let it, so that an error is a mistake and no noise. Where the
outputs differ, the exchanges are tried, the best first and others on top of it, until the port's output is right; where
none helps, weights that quantising keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from minimax_tools.errors import TargetError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import EMBEDDING, expected_layer_shapes, layer_prefix
from minimax_tools.reference.float32_layer import Float32Layer
from minimax_tools.synthetic.random_weights import SyntheticWeights
from neuron.ports.port_errors import PortEndError
from neuron.weight_trace.exchanges import Exchange, OnAccess, Tensors
from neuron.weight_trace.kept_weights import KEPT, keep_quantised

_BATCH_SIZE, _NUM_ROWS = 2, 16
_SEED = 0
# A port in float32 is right to 1e-6; one that computes in BF16 whatever it is built in, to about 1 % of the delta.
_FLOAT32_LIMIT = 1e-3
_BF16_LIMIT = 0.05
# What makes the error so much smaller is a part of what is wrong.
_IMPROVEMENT = 0.8
# What of the error may be left by exchanges that repair it: the factor of a scale is read in BF16.
_LEFT = 0.01
_MOST_EXCHANGES = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrialInput:
    """What both layers are fed: hidden states [B,S,H] float32, mask [B,S] and positions [B,S]."""

    hidden_states: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPort:
    """A port that can be run.

    Args:
        run: Converts and loads tensors, and gives the port's output [B,S,H].
        computes_in_bf16: Whether it holds BF16 though it was built in float32.
    """

    run: Callable[[Tensors, TrialInput], torch.Tensor]
    computes_in_bf16: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """How the port's output compares with the reference layer's.

    Args:
        error: ‖port − reference‖ / ‖reference's delta‖; None where the port could not run.
        limit: Up to where the outputs agree.
        repairs: The exchanges with which they agree, where without them they do not.
        repaired_error: The error with them.
        kept_error: The error on weights that quantising keeps, where no exchange repairs it on others; else None.
        kept_as: How that quantises: a name of `KEPT`; None where nothing was tried.
        failure: Why the port could not run.
    """

    error: float | None
    limit: float
    repairs: tuple[Exchange, ...] = ()
    repaired_error: float | None = None
    kept_error: float | None = None
    kept_as: str | None = None
    failure: str | None = None

    @property
    def is_right(self) -> bool:
        """Whether the port's output agrees as it is."""
        return self.error is not None and self.error <= self.limit

    @property
    def is_quantised(self) -> bool:
        """Whether it agrees but for what quantising costs."""
        return self.kept_error is not None and self.kept_error <= self.limit


def run_trial(
    port: TrialPort, spec: ModelSpec, layer: int, exchanges: Sequence[Exchange], *, keeps_tensors: bool
) -> TrialOutcome:
    """Run the port on made weights, and where it is wrong look for the exchanges that make it right.

    Args:
        port: The port.
        spec: The model.
        layer: The layer.
        exchanges: What to try.
        keeps_tensors: Whether the made weights are kept, float32; else each is made anew whenever it is asked for.
    """
    tensors, given = _make_tensors(spec, layer), _make_input(spec)
    if keeps_tensors:
        tensors = dict(tensors)
    expected = _reference_output(spec, tensors, given)

    def error_of(chosen: Sequence[Exchange]) -> float:
        changed = tensors
        for exchange in chosen:
            changed = _with(changed, exchange.change(changed))
        return _measure_error(port.run(changed, given), expected, given)

    limit = _BF16_LIMIT if port.computes_in_bf16 else _FLOAT32_LIMIT
    try:
        error = error_of(())
    except PortEndError:
        raise
    except TargetError as failure:
        return TrialOutcome(error=None, limit=limit, failure=failure.found or failure.what)
    if error <= limit:
        return TrialOutcome(error=error, limit=limit)
    chosen: list[Exchange] = []
    left = error
    while len(chosen) < _MOST_EXCHANGES:
        tried = [
            (error_of([*chosen, exchange]), exchange) for exchange in exchanges if exchange not in chosen
        ]
        if not tried:
            break
        best_error, best = min(tried, key=lambda entry: entry[0])
        if best_error > _IMPROVEMENT * left and best_error > limit:
            break
        chosen.append(best)
        left = best_error
        if left <= max(limit, _LEFT * error):
            return TrialOutcome(error=error, limit=limit, repairs=tuple(chosen), repaired_error=left)
    outcome = TrialOutcome(error=error, limit=limit)
    for name, keep in KEPT.items():
        kept = keep_quantised(tensors, keep)
        kept_error = _measure_error(port.run(kept, given), _reference_output(spec, kept, given), given)
        if outcome.kept_error is None or kept_error < outcome.kept_error:
            outcome = replace(outcome, kept_error=kept_error, kept_as=name)
        if outcome.is_quantised:
            break
    return outcome


def _measure_error(found: torch.Tensor, expected: torch.Tensor, given: TrialInput) -> float:
    """Of the port's output, over what the reference layer adds to its input."""
    error = (found.float() - expected).norm() / (expected - given.hidden_states).norm()
    return float(error) if torch.isfinite(error) else float("inf")


def _make_tensors(spec: ModelSpec, layer: int) -> Tensors:
    """A layer that behaves as if it were trained, its weights BF16 numbers in float32."""
    weights = SyntheticWeights(spec, seed=_SEED)

    def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.cat(list(weights.make(layer_prefix(layer) + name, shape=shape, dtype=torch.float32)))

    return OnAccess({name: partial(make, name, shape) for name, shape in expected_layer_shapes(spec).items()})


def _with(tensors: Tensors, changed: Tensors) -> Tensors:
    """Tensors, some of them changed."""
    return OnAccess(
        {name: partial((changed if name in changed else tensors).__getitem__, name) for name in tensors}
    )


def _make_input(spec: ModelSpec) -> TrialInput:
    num_tokens = _BATCH_SIZE * _NUM_ROWS
    shape = (min(spec.vocab_size, num_tokens), spec.hidden_size)
    embedding = SyntheticWeights(spec, seed=_SEED).make(EMBEDDING, shape=shape, dtype=torch.float32)
    rows = next(iter(embedding))
    repeated = rows[torch.arange(num_tokens) % len(rows)]
    batch_shape = (_BATCH_SIZE, _NUM_ROWS)
    return TrialInput(
        hidden_states=repeated.reshape(*batch_shape, spec.hidden_size).clone(),
        attention_mask=torch.ones(batch_shape, dtype=torch.int64),
        position_ids=torch.arange(_NUM_ROWS).expand(batch_shape).clone(),
    )


def _reference_output(spec: ModelSpec, tensors: Tensors, given: TrialInput) -> torch.Tensor:
    inputs = Inputs(
        input_ids=torch.zeros_like(given.attention_mask),
        attention_mask=given.attention_mask,
        position_ids=given.position_ids,
        source="made hidden states",
    )
    sites = Float32Layer(spec, tensors).run(given.hidden_states, inputs, router_experts=None)
    return sites[Site.OUTPUT]
