"""The residual stream of a dump, proved by sums and norms; each test must fail on what is no stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from minimax_tools.dumps.capture import DumpCapture
from minimax_tools.dumps.name_map import NameMap
from minimax_tools.model.sites import Site

T, H = 24, 64


def norm(stream: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the RMS norm, rounded twice as kernels do."""
    values = stream.float()
    unscaled = values * values.square().mean(dim=-1, keepdim=True).add(1e-6).rsqrt()
    return unscaled.bfloat16() * weight


@pytest.fixture
def model() -> dict[str, torch.Tensor]:
    """Two layers whose stream has a massive channel, as trained models have."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    stream = draw(T, H)
    stream[:, 3] = 800.0
    held = {"model.embed_tokens": stream}
    for layer in range(2):
        name = f"model.layers.{layer}"
        held[f"{name}.input_layernorm"] = norm(stream, draw(H))
        held[f"{name}.self_attn"] = draw(T, H, scale=0.3)
        stream = stream + held[f"{name}.self_attn"]
        held[f"{name}.post_attention_layernorm"] = norm(stream, draw(H))
        held[f"{name}.mlp"] = draw(T, H, scale=0.3)
        stream = stream + held[f"{name}.mlp"]
        held[name] = stream
    held["model.norm"] = norm(stream, draw(H))
    return held


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[Mapping[str, torch.Tensor]], DumpCapture]:
    """Opens a dump with these tensors."""

    def open_dump(held: Mapping[str, torch.Tensor]) -> DumpCapture:
        folder = tmp_path / "dp0" / f"prefill_s{T}_0"
        for name, tensor in held.items():
            (folder / name).mkdir(parents=True)
            torch.save(tensor, folder / name / "rank0.pt")
        meta = {"req_ids": ["0"], "positions": list(range(T))}
        (folder / f"{folder.name}_meta.json").write_text(json.dumps(meta))
        return DumpCapture.open(tmp_path, NameMap())

    return open_dump


def held_sites(capture: DumpCapture) -> list[tuple[int, Site]]:
    wanted = (Site.ATTN_RESIDUAL, Site.OUTPUT)
    return [(layer, site) for layer in capture.layers for site in capture.sites(layer) if site in wanted]


ALL = [(layer, site) for layer in (0, 1) for site in (Site.ATTN_RESIDUAL, Site.OUTPUT)]


def test_stream_is_proved_by_its_sum(
    model: dict[str, torch.Tensor], opened: Callable[..., DumpCapture]
) -> None:
    capture = opened(model)
    assert held_sites(capture) == ALL
    assert torch.equal(capture.read(1, Site.OUTPUT)[0], model["model.layers.1"])
    assert any("bit for bit" in note for note in capture.notes)


def test_sum_stands_for_an_output_that_is_not_held(
    model: dict[str, torch.Tensor], opened: Callable[..., DumpCapture]
) -> None:
    last = model.pop("model.layers.1")
    first = model.pop("model.layers.0")
    capture = opened(model)
    assert held_sites(capture) == ALL
    assert torch.equal(capture.read(0, Site.OUTPUT)[0], first)
    assert torch.equal(capture.read(1, Site.OUTPUT)[0], last)
    # Read again, and in another order.
    assert torch.equal(capture.read(0, Site.OUTPUT)[0], first)


def test_stream_that_is_no_sum_is_proved_by_the_norm_that_reads_it(
    model: dict[str, torch.Tensor], opened: Callable[..., DumpCapture]
) -> None:
    """A port with a mistake of its own: half of what the experts give is added."""
    wrong = model["model.layers.0"] - model["model.layers.0.mlp"] / 2
    weight = torch.linspace(0.5, 2.0, H).bfloat16()
    model |= {"model.layers.0": wrong, "model.layers.1.input_layernorm": norm(wrong, weight)}
    capture = opened(model)
    assert torch.equal(capture.read(0, Site.OUTPUT)[0], wrong)
    assert any(
        "model.layers.{layer} is the layer's output: the norm behind" in note for note in capture.notes
    )


@pytest.mark.parametrize("missing", ["model.layers.0.mlp", "model.layers.0.self_attn"])
def test_stream_without_an_addend_is_refused(
    missing: str, model: dict[str, torch.Tensor], opened: Callable[..., DumpCapture]
) -> None:
    """The massive channel hides what lacks from any figure of the whole tensor."""
    model["model.layers.0"] = model["model.layers.0"] - model[missing]
    without_norms = {name: held for name, held in model.items() if not name.endswith("norm")}
    capture = opened(without_norms)
    assert (0, Site.OUTPUT) not in held_sites(capture)
    assert any("sites: {output:" in note for note in capture.notes)


def test_norm_of_another_stream_proves_nothing(
    model: dict[str, torch.Tensor], opened: Callable[..., DumpCapture]
) -> None:
    """The norms read the stream without the delta before them."""
    del model["model.layers.0"], model["model.layers.1"]
    weight = torch.linspace(0.5, 2.0, H).bfloat16()
    stream = model["model.embed_tokens"]
    model["model.layers.0.post_attention_layernorm"] = norm(stream, weight)
    stream = stream + model["model.layers.0.self_attn"]
    model["model.layers.1.input_layernorm"] = norm(stream, weight)
    capture = opened(model)
    assert (0, Site.ATTN_RESIDUAL) not in held_sites(capture)
    assert (0, Site.OUTPUT) not in held_sites(capture)
    assert any("nothing tells the output of layer" in note for note in capture.notes)


def test_too_few_tokens_prove_nothing_by_a_norm(
    model: dict[str, torch.Tensor], tmp_path: Path, opened: Callable[..., DumpCapture]
) -> None:
    del model["model.layers.0"], model["model.layers.1"]
    opened(model)
    [meta] = tmp_path.rglob("*_meta.json")
    meta.write_text(json.dumps({"req_ids": ["0"], "positions": [0, 1, 2, *[2] * (T - 3)]}))
    capture = DumpCapture.open(tmp_path, NameMap())
    assert held_sites(capture) == []


def write_pass(folder: Path, name: str, held: Mapping[str, torch.Tensor], *, request: str) -> None:
    """Write one more pass of the T tokens of a request."""
    for module, tensor in held.items():
        (folder / name / module).mkdir(parents=True)
        torch.save(tensor, folder / name / module / "rank0.pt")
    meta = {"req_ids": [request], "positions": list(range(len(tensor)))}
    (folder / name / f"{name}_meta.json").write_text(json.dumps(meta))


def test_tokens_that_are_all_alike_prove_nothing_by_a_norm(
    model: dict[str, torch.Tensor], opened: Callable[..., DumpCapture]
) -> None:
    """A warm-up of one token over and over: whatever a norm is given, one weight fits all its tokens."""
    del model["model.layers.0"], model["model.layers.1"]
    model["model.layers.0.mlp"] = model["model.layers.0.mlp"] * 3
    rounding = 1 + 2**-8 * (torch.arange(T)[:, None] % 2)
    alike = {name: (held[:1] * rounding).to(held.dtype) for name, held in model.items()}
    assert held_sites(opened(alike)) == []


def test_warm_up_of_tokens_that_are_all_alike_leaves_the_proof_to_another_pass(
    model: dict[str, torch.Tensor], tmp_path: Path, opened: Callable[..., DumpCapture]
) -> None:
    del model["model.layers.0"], model["model.layers.1"]
    opened(model)
    warm = {name: held[:1].repeat(8, 1) for name, held in model.items()}
    write_pass(tmp_path / "dp0", "prefill_s8_0", warm, request="warm-up")
    capture = DumpCapture.open(tmp_path, NameMap())
    assert held_sites(capture) == ALL


def test_addends_of_other_widths_prove_nothing(
    model: dict[str, torch.Tensor], opened: Callable[..., DumpCapture]
) -> None:
    model["model.layers.0.self_attn"] = torch.nn.functional.pad(model["model.layers.0.self_attn"], (0, 8))
    capture = opened(model)
    # The norm behind still proves what the layers return.
    assert held_sites(capture) == [(0, Site.OUTPUT), (1, Site.ATTN_RESIDUAL), (1, Site.OUTPUT)]
