from __future__ import annotations

import pytest
import torch

from minimax_tools.errors import TargetError
from neuron.devices.ranks import Ranks
from neuron.ports.packed_request import DividedTokens, refuse_uneven


def test_a_single_rank_has_all_tokens() -> None:
    tokens, states = DividedTokens(Ranks()), torch.randn(1, 3, 4)
    assert tokens.cut(states) is states
    assert tokens.join(states) is states


def test_ranks_that_do_not_divide_a_bucket_are_refused() -> None:
    refuse_uneven(Ranks(degree=8))
    with pytest.raises(TargetError, match="3 ranks do not divide a prefill of 128 tokens"):
        refuse_uneven(Ranks(degree=3))
