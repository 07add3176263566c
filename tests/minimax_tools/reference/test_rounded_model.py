"""Copies of a whole model, chained: the exact one is the model, the others have noise and plausible flips."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors, ModelTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.inputs import pad_rows
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import EMBEDDING
from minimax_tools.reference.layer import ReferenceLayer
from minimax_tools.reference.rounded_model import FLIP_SHARES, PlausibleFlips, RoundedModel
from minimax_tools.reference.rounding import RoundingKind

LEARNED = Path(__file__).parents[2] / "models" / "learned"
KINDS = (RoundingKind.EXACT, RoundingKind.NEAREST, *(RoundingKind.RANDOM,) * (1 + len(FLIP_SHARES)))


def test_exact_copy_is_the_model_in_float32() -> None:
    spec = ModelSpec.from_folder(LEARNED)
    batch = pad_rows(
        [[5, 9, 40, 41, 7], [60, 61, 62]], padding_side="left", buckets=(), pad_token_id=0, source="test"
    )
    with CheckpointReader(LEARNED) as reader:
        (found,) = RoundedModel(spec=spec, reader=reader, kinds=KINDS).run([batch])
        states = ModelTensors.open(reader, spec, torch.bfloat16, with_layers=False)[EMBEDDING][
            batch.input_ids
        ]
        states = states.float()
        for number in range(spec.num_hidden_layers):
            layer = ReferenceLayer(spec, number)
            layer.load_state_dict(dict(LayerTensors.open(reader, spec, number, torch.float32)))
            with torch.no_grad():
                states = layer.float()(states, batch.attention_mask, batch.position_ids)
    is_real = batch.attention_mask.bool()
    torch.testing.assert_close(found[0][is_real], states[is_real], rtol=1e-3, atol=1e-3)
    for copy in found[1:]:
        error = (copy[is_real] - found[0][is_real]).norm() / found[0][is_real].norm()
        assert 1e-4 < float(error) < 0.3


@pytest.fixture
def scores() -> torch.Tensor:
    """Biased scores of five copies of one row of two tokens: the second token's third place is almost a draw."""
    exact = torch.tensor([[[0.9, 0.8, 0.5, 0.1, 0.0], [0.9, 0.8, 0.5, 0.499, 0.0]]])
    noise = 1e-3 * torch.randn(5, 1, 2, 5, generator=torch.Generator().manual_seed(0))
    noise[0] = 0.0
    return (exact + noise).flatten(0, 1)


def test_last_copy_makes_every_plausible_flip_and_no_other(scores: torch.Tensor) -> None:
    flips = PlausibleFlips(num_copies=5, num_experts_per_tok=3, seed=0)
    chosen = flips.choose(scores).unflatten(0, (5, 1))
    own = scores.topk(3, dim=-1).indices.unflatten(0, (5, 1))
    # Copies that do not flip choose by their own scores.
    assert torch.equal(chosen[:3], own[:3])
    # The first token's choice is clear.
    assert all(set(copy[0, 0].tolist()) == {0, 1, 2} for copy in chosen)
    assert set(chosen[4, 0, 1].tolist()) != set(own[4, 0, 1].tolist())
    assert set(chosen[4, 0, 1].tolist()) in ({0, 1, 2}, {0, 1, 3})


@pytest.mark.parametrize("flipped", [(), (4,), (1, 3, 4)])
def test_flip_that_rounding_made_is_not_undone(scores: torch.Tensor, flipped: tuple[int, ...]) -> None:
    for copy in range(1, 5):
        # Rounding turned the almost equal scores round in these copies alone.
        scores[copy, 1, 2:4] = torch.tensor([0.498, 0.5] if copy in flipped else [0.5, 0.498])
    flips = PlausibleFlips(num_copies=5, num_experts_per_tok=3, seed=0)
    chosen = flips.choose(scores).unflatten(0, (5, 1))
    assert set(chosen[0, 0, 1].tolist()) == {0, 1, 2}
    assert set(chosen[4, 0, 1].tolist()) == {0, 1, 3}


def test_model_that_uses_all_experts_has_no_flips() -> None:
    scores = torch.rand(5, 2, 4)
    flips = PlausibleFlips(num_copies=5, num_experts_per_tok=4, seed=0)
    assert sorted(flips.choose(scores)[4, 0].tolist()) == [0, 1, 2, 3]
