from __future__ import annotations

import torch

from minimax_tools.synthetic.massive_channels import plant_massive_channels
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.synthetic.toy_tokenizer import TokenIds
from minimax_tools.synthetic.trainee import Trainee


def test_same_few_channels_are_massive_for_every_token_and_tame_behind_a_norm() -> None:
    model = SyntheticModel(num_hidden_layers=1, num_local_experts=4, vocab_size=262)
    config = model.config(dtype=torch.float32, token_ids=TokenIds(bos_token_id=0, eos_token_id=1))
    trainee = Trainee(config, seed=0)
    plant_massive_channels(trainee, count=3, seed=0)
    tensors = trainee.tensors()
    stream = tensors["model.embed_tokens.weight"]
    typical = stream.abs().median()
    assert ((stream.abs() > 20 * typical).sum(1) == 3).all()
    normed = stream * stream.square().mean(1, keepdim=True).rsqrt() * tensors["model.norm.weight"]
    massive = stream[0].abs() > 20 * typical
    assert 1.5 < float(normed[:, massive].abs().mean()) < 2.5
    assert 0.8 < float(normed[:, ~massive].square().mean().sqrt()) < 1.2
