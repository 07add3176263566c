"""The traced part of a port tensor: no element that changed is left out."""

from __future__ import annotations

import torch

from neuron.weight_trace.port_tensors import Snapshot, TensorPart


def test_the_part_that_changed_is_the_smallest_that_holds_every_change() -> None:
    tensor = torch.ones(6, 3, 5)
    before = Snapshot.of(tensor)
    assert before.values.dim() == 0
    assert TensorPart.changed(before, tensor) is None
    tensor[[1, 4], :, 2] = 2
    part = TensorPart.changed(before, tensor)
    assert part is not None
    assert part.of(tensor).tolist() == torch.full((2, 3, 1), 2.0).tolist()
    assert part.of_snapshot(before).tolist() == torch.ones(2, 3, 1).tolist()
