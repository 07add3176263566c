from __future__ import annotations

import pytest
import torch

from minimax_tools.model import weight_names
from minimax_tools.reference.layer import ReferenceLayer
from minimax_tools.synthetic.checkpoint import plan_tensors
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.synthetic.toy_tokenizer import TokenIds
from minimax_tools.synthetic.trainee import Trainee

MODEL = SyntheticModel(num_hidden_layers=2, hidden_size=64, num_local_experts=4, vocab_size=262)
ROWS = torch.randint(262, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def trainee() -> Trainee:
    return Trainee(
        MODEL.config(dtype=torch.float32, token_ids=TokenIds(bos_token_id=0, eos_token_id=1)), seed=3
    )


def test_tensors_are_those_of_the_hubs_checkpoint(trainee: Trainee) -> None:
    planned = {tensor.name: tensor.shape for tensor in plan_tensors(MODEL, dtype=torch.float32)}
    assert {name: tuple(tensor.shape) for name, tensor in trainee.tensors().items()} == planned


def test_tensors_are_the_model_that_was_trained(trainee: Trainee) -> None:
    """mm2's own layers, given the tensors by the hub's names, come to the same losses."""
    tensors = trainee.tensors()
    spec = MODEL.spec()
    states = tensors[weight_names.EMBEDDING][ROWS[:, :-1]]
    mask, positions = torch.ones(2, 8, dtype=torch.int64), torch.arange(8).expand(2, 8)
    with torch.no_grad():
        for number in range(2):
            prefix = weight_names.layer_prefix(number)
            layer = ReferenceLayer(spec, number)
            layer.load_state_dict(
                {
                    name.removeprefix(prefix): tensor
                    for name, tensor in tensors.items()
                    if name.startswith(prefix)
                }
            )
            states = layer(states, mask, positions)
        states = states * (states.square().mean(-1, keepdim=True) + spec.rms_norm_eps).rsqrt()
        logits = (states * tensors[weight_names.FINAL_NORM]) @ tensors[weight_names.LM_HEAD].T
        mine = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ROWS[:, 1:].flatten(), reduction="none"
        )
        assert torch.allclose(trainee.token_losses(ROWS).flatten(), mine, atol=1e-5)


def test_choices_are_noted_for_every_layer_and_can_be_replaced(trainee: Trainee) -> None:
    with torch.no_grad():
        before = trainee.token_losses(ROWS)
        chosen = trainee.choices
        assert [choice.shape for choice in chosen] == [(16, 4)] * 2
        with trainee.rerouted(lambda experts: experts.roll(1, dims=0)):
            trainee.token_losses(ROWS)
        rolled = trainee.choices
        # The first layer's choice depends on nothing that was replaced.
        assert torch.equal(rolled[0], chosen[0].roll(1, dims=0))
        assert torch.equal(trainee.token_losses(ROWS), before)
