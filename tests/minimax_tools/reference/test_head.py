from __future__ import annotations

import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import FINAL_NORM, LM_HEAD
from minimax_tools.reference.rounding import Float32Head


def exact_logits(reader: CheckpointReader, states: torch.Tensor, head: str, eps: float) -> torch.Tensor:
    states = states.double()
    normed = states / (states.square().mean(-1, keepdim=True) + eps).sqrt() * reader.read(FINAL_NORM).double()
    return normed @ reader.read(head).double().T


def test_head_is_norm_and_projection_in_float32(
    reader: CheckpointReader, spec: ModelSpec, capture: Capture
) -> None:
    states = capture.read(3, Site.OUTPUT)
    norm, lm_head = (reader.read_weight(name, torch.bfloat16) for name in (FINAL_NORM, LM_HEAD))
    found = Float32Head(norm, lm_head, eps=spec.rms_norm_eps).run(states)
    assert set(found) == {ModelSite.FINAL_NORM, ModelSite.LOGITS}
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    exact = exact_logits(reader, states, LM_HEAD, spec.rms_norm_eps)
    error = (found[ModelSite.LOGITS].double() - exact).norm() / exact.norm()
    assert float(error) < 1e-6
