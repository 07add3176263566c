"""Dumps as captures: which tensors make up a site, and as which batch they are laid out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.dumps.capture import DumpCapture
from minimax_tools.dumps.name_map import NameMap
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.model.sites import ModelSite, Site

MASK = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()


@pytest.fixture
def other(other_side: Callable[..., Any]) -> Any:
    """A side of two prompts, of 3 and 2 tokens."""
    return other_side(mask=MASK)


def save(folder: Path, name: str, tensor: torch.Tensor) -> None:
    """Write a file of msprobe, which stores padded and packed rows alike and does not say which."""
    data = folder / "step0" / "rank0" / "dump_tensor_data"
    data.mkdir(parents=True, exist_ok=True)
    module, point = name.split(":")
    torch.save(tensor, data / f"Module.model.{module}.SomeClass.forward.0.{point}.pt")


def read_map(folder: Path, text: str) -> NameMap:
    (folder / "map.yaml").write_text(text)
    return NameMap.read(folder / "map.yaml")


def test_flat_rows_are_padded_as_the_other_tensors_are_and_alone_tell_nothing(
    tmp_path: Path, other: Any
) -> None:
    save(tmp_path, "layers.0.mlp.gate:output.0", torch.arange(8.0)[:, None])
    capture = DumpCapture.open(tmp_path, NameMap()).laid_out_as(other)
    with pytest.raises(CaptureError, match="router_logits of layer 0.*nothing tells which rows are real"):
        capture.read(0, Site.ROUTER_LOGITS)
    packed = DumpCapture.open(tmp_path, read_map(tmp_path, "rows: packed")).laid_out_as(other)
    assert packed.read(0, Site.ROUTER_LOGITS)[..., 0].tolist() == [[0, 1, 2], [3, 4, 0]]
    save(tmp_path, "layers.0:output.0", torch.zeros(2, 4, 5))
    padded = DumpCapture.open(tmp_path, NameMap()).laid_out_as(other)
    assert padded.read(0, Site.ROUTER_LOGITS)[..., 0].tolist() == [[0, 1, 2], [4, 5, 0]]


def test_residuals_beside_norms_are_recognised(tmp_path: Path, other: Any) -> None:
    delta, residual = torch.full((5, 2), 1.0), torch.full((5, 2), 3.0)
    for name in ("layers.0", "layers.0.post_attention_layernorm"):
        save(tmp_path, f"{name}:output.0", delta)
        save(tmp_path, f"{name}:output.1", residual)
    save(tmp_path, "layers.0.post_attention_layernorm:input.0", torch.full((5, 2), 9.0))
    capture = DumpCapture.open(tmp_path, NameMap()).laid_out_as(other)
    assert capture.read(0, Site.OUTPUT)[0, 0, 0] == 4.0
    assert capture.read(0, Site.ATTN_RESIDUAL)[0, 0, 0] == 3.0
    assert capture.read(0, Site.POST_NORM)[0, 0, 0] == 1.0


def test_a_layers_input_is_the_output_before_it(tmp_path: Path) -> None:
    save(tmp_path, "embed_tokens:output.0", torch.full((2, 3, 2), 1.0))
    save(tmp_path, "layers.0:output.0", torch.full((2, 3, 2), 2.0))
    save(tmp_path, "layers.1:output.0", torch.full((2, 3, 2), 3.0))
    capture = DumpCapture.open(tmp_path, NameMap())
    assert [capture.read(layer, Site.INPUT)[0, 0, 0] for layer in (0, 1)] == [1.0, 2.0]
    assert capture.model_sites() == (ModelSite.EMBEDDING,)


def test_heads_are_laid_out_before_tokens(tmp_path: Path, other: Any) -> None:
    save(tmp_path, "layers.0.rotary:output.0", torch.arange(24).reshape(2, 3, 2, 2))
    text = 'sites: {q_rope: {from: "layers.{layer}.rotary", transpose: [0, 2, 1, 3]}}'
    capture = DumpCapture.open(tmp_path, read_map(tmp_path, text)).laid_out_as(other)
    heads = capture.read(0, Site.Q_ROPE)
    assert heads.shape == (2, 2, 3, 2)
    assert heads[0, 1].tolist() == [[2, 3], [6, 7], [10, 11]]
    assert not heads[1, :, 2].any()


def test_lengths_of_its_own_lay_out_a_dump_alone(tmp_path: Path, other_side: Callable[..., Any]) -> None:
    save(tmp_path, "layers.0:output.0", torch.arange(8.0).reshape(2, 4, 1))
    capture = DumpCapture.open(tmp_path, read_map(tmp_path, "lengths: [3, 2]\npadding: left"))
    assert capture.read(0, Site.OUTPUT)[..., 0].tolist() == [[1, 2, 3], [6, 7, 0]]
    mask = capture.read_attention_mask()
    assert mask is not None
    assert mask.tolist() == MASK.tolist()
    with pytest.raises(IncomparableError, match="is of other prompts than the capture on the other side"):
        capture.laid_out_as(other_side(mask=MASK.flip(0)))


def test_single_prompt_per_pass_is_put_together(tmp_path: Path, other: Any) -> None:
    for number, tensor in enumerate((torch.arange(4.0), torch.arange(10.0, 14.0))):
        folder = tmp_path / "dp0" / f"prefill_s4_{number}" / "layers.0.mlp"
        folder.mkdir(parents=True)
        torch.save(tensor[:, None], folder / "rank0.pt")
    names = read_map(tmp_path, "steps: [prefill_s4_0, prefill_s4_1]")
    capture = DumpCapture.open(tmp_path, names).laid_out_as(other)
    assert capture.read(0, Site.MOE_DELTA)[..., 0].tolist() == [[0, 1, 2], [10, 11, 0]]


def save_passes(folder: Path, module: str, *passes: torch.Tensor) -> None:
    for number, tensor in enumerate(passes, start=1):
        torch.save(tensor, folder / f"captured_tensors_cte_step_{number}_module_{module}_output.pt")


def test_mask_file_tells_the_rows_of_prompts_in_passes_of_their_own(tmp_path: Path, other: Any) -> None:
    save_passes(tmp_path, "layers.0.mlp", *torch.arange(8.0).reshape(2, 1, 4, 1))
    torch.save(torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]]), tmp_path / "mask.pt")
    names = read_map(tmp_path, "steps: [['1'], ['2']]\nattention_mask: mask.pt")
    capture = DumpCapture.open(tmp_path, names, format_="nxdi").laid_out_as(other)
    assert capture.read(0, Site.MOE_DELTA)[..., 0].tolist() == [[1, 2, 3], [6, 7, 0]]


@pytest.mark.parametrize("others", [(), ((1, 4, 1), (1, 1, 1))], ids=["no layer", "a layer of fewer rows"])
def test_chunks_are_told_by_any_site_that_has_all_tokens(
    tmp_path: Path, others: tuple[tuple[int, ...], ...], other_side: Callable[..., Any]
) -> None:
    save_passes(
        tmp_path, "embed_tokens", torch.arange(4.0)[None, :, None], torch.arange(4.0, 7.0)[None, :, None]
    )
    save_passes(tmp_path, "layers.0.mlp", *map(torch.ones, others))
    capture = DumpCapture.open(tmp_path, read_map(tmp_path, "steps: [['1', '2']]"), format_="nxdi")
    aligned = capture.laid_out_as(other_side(mask=torch.ones(1, 7, dtype=torch.bool)))
    assert aligned.read(None, ModelSite.EMBEDDING)[0, :, 0].tolist() == list(range(7))
