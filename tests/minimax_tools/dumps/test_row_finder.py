"""Requests of a dump that are the other side's prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.dumps.assembly import batch_mask, lay_out
from minimax_tools.dumps.capture import DumpCapture
from minimax_tools.dumps.name_map import NameMap
from minimax_tools.errors import CaptureError
from minimax_tools.model.sites import Site

H = 16


def write(directory: Path, lengths: tuple[int, ...]) -> torch.Tensor:
    """Write a pass of requests of these lengths, one after another; return the embedding [T,H]."""
    embedding = torch.randn(sum(lengths), H, generator=torch.Generator().manual_seed(0))
    folder = directory / "dp0" / "prefill_s64_0"
    for name, values in (("model.embed_tokens", embedding), ("model.layers.0.mlp", embedding * 2)):
        (folder / name).mkdir(parents=True)
        torch.save(torch.cat((values, values.new_zeros(64 - len(values), H))), folder / name / "rank0.pt")
    positions = [position for length in lengths for position in range(length)]
    positions += [0] * (64 - len(positions))
    meta = {"req_ids": [str(number) for number in range(len(lengths))], "positions": positions}
    (folder / "prefill_s64_0_meta.json").write_text(json.dumps(meta))
    return embedding


@pytest.fixture
def side(other_side: Callable[..., Any]) -> Callable[[torch.Tensor, tuple[int, ...]], Any]:
    """Makes a side of prompts of these lengths, given the embeddings [T,H] of their tokens."""

    def make(embedding: torch.Tensor, lengths: tuple[int, ...]) -> Any:
        mask = batch_mask(lengths)
        return other_side(mask=mask, embedding=lay_out(embedding, mask))

    return make


def test_embeddings_tell_the_requests_among_others(tmp_path: Path, side: Callable[..., Any]) -> None:
    embedding = write(tmp_path, (12, 9, 9))
    wanted = torch.cat((embedding[21:], embedding[:12]))
    capture = DumpCapture.open(tmp_path, NameMap()).laid_out_as(side(wanted, (9, 12)))
    read = capture.read(0, Site.MOE_DELTA)
    assert torch.equal(read[0, :9], embedding[21:] * 2)
    assert torch.equal(read[1], embedding[:12] * 2)


def test_equal_prompts_have_a_request_each(tmp_path: Path, side: Callable[..., Any]) -> None:
    write(tmp_path, (12, 9, 9))
    folder = tmp_path / "dp0" / "prefill_s64_0"
    held = torch.load(folder / "model.embed_tokens/rank0.pt")
    held[21:30] = held[12:21]
    torch.save(held, folder / "model.embed_tokens/rank0.pt")
    wanted = held[12:21].repeat(2, 1)
    capture = DumpCapture.open(tmp_path, NameMap()).laid_out_as(side(wanted, (9, 9)))
    experts = torch.load(folder / "model.layers.0.mlp/rank0.pt")
    assert torch.equal(capture.read(0, Site.MOE_DELTA), experts[12:30].unflatten(0, (2, 9)))


def test_embeddings_are_read_only_if_lengths_do_not_tell(tmp_path: Path, side: Callable[..., Any]) -> None:
    embedding = write(tmp_path, (12, 9))
    capture = DumpCapture.open(tmp_path, NameMap())
    (tmp_path / "dp0/prefill_s64_0/model.embed_tokens/rank0.pt").unlink()
    wanted = torch.cat((embedding[12:], embedding[:12]))
    assert torch.equal(
        capture.laid_out_as(side(wanted, (9, 12))).read(0, Site.MOE_DELTA)[1], embedding[:12] * 2
    )
    # A prompt of 9 tokens may be the first 9 of the longer request.
    with pytest.raises(CaptureError, match=r"embed_tokens/rank0\.pt"):
        capture.laid_out_as(side(wanted[:9], (9,)))
