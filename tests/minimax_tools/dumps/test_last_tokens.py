"""Logits that a pass holds of the tokens to sample from alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minimax_tools.capture.source import CaptureSource
from minimax_tools.dumps.assembly import batch_mask
from minimax_tools.dumps.capture import DumpCapture
from minimax_tools.dumps.name_map import NameMap
from minimax_tools.model.sites import ModelSite

V, T = 16, 12


def opened(directory: Path, other_side: Callable[..., Any], *, num_prompt: int) -> CaptureSource:
    """Open a pass of one request's T tokens with the logits of the last, beside a prompt that may be shorter."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(T, V, generator=generator)
    folder = directory / "dp0" / f"prefill_s{T}_0"
    logits = torch.randn(1, V, generator=generator)
    for name, values in (("model.embed_tokens", embedding), ("lm_head", logits)):
        (folder / name).mkdir(parents=True)
        torch.save(values, folder / name / "rank0.pt")
    (folder / f"{folder.name}_meta.json").write_text(
        json.dumps({"req_ids": ["0"], "positions": list(range(T))})
    )
    side = other_side(mask=batch_mask((num_prompt,)), embedding=embedding[None, :num_prompt])
    return DumpCapture.open(directory, NameMap()).laid_out_as(side)


def test_last_token_of_the_prompt_is_held(tmp_path: Path, other_side: Callable[..., Any]) -> None:
    capture = opened(tmp_path, other_side, num_prompt=T)
    held = capture.held_tokens(ModelSite.LOGITS)
    assert held is not None
    assert held.nonzero().tolist() == [[0, T - 1]]
    logits = torch.load(tmp_path / f"dp0/prefill_s{T}_0/lm_head/rank0.pt")
    assert torch.equal(capture.read(None, ModelSite.LOGITS)[0, -1], logits[0])


def test_last_token_behind_the_prompt_is_not_taken_for_the_prompts(
    tmp_path: Path, other_side: Callable[..., Any]
) -> None:
    capture = opened(tmp_path, other_side, num_prompt=T - 3)
    assert ModelSite.LOGITS not in capture.model_sites()
    assert any("logits: held of some tokens alone, nothing tells which" in note for note in capture.notes)
