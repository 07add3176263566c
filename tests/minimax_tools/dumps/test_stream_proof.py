"""The residual stream of a dump, proved by sums and norms; each test must fail on what is no stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from minimax_tools.dumps.capture import DumpCapture
from minimax_tools.dumps.name_map import NameMap
from minimax_tools.model.sites import Site

T, H = 24, 64
Model = dict[str, torch.Tensor]
Open = Callable[..., DumpCapture]


def norm(stream: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the RMS norm, rounded twice as kernels do."""
    values = stream.float()
    unscaled = values * values.square().mean(dim=-1, keepdim=True).add(1e-6).rsqrt()
    return unscaled.bfloat16() * weight


@pytest.fixture
def model() -> Model:
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
def opened(tmp_path: Path, write_pass: Callable[..., None]) -> Open:
    """Opens a dump with these tensors."""

    def open_dump(held: Mapping[str, torch.Tensor], positions: Sequence[int] = range(T)) -> DumpCapture:
        write_pass(tmp_path / "dp0" / f"prefill_s{T}_0", held, positions=positions)
        return DumpCapture.open(tmp_path, NameMap())

    return open_dump


def held_sites(capture: DumpCapture) -> list[tuple[int, Site]]:
    wanted = (Site.ATTN_RESIDUAL, Site.OUTPUT)
    return [(layer, site) for layer in capture.layers for site in capture.sites(layer) if site in wanted]


ALL = [(layer, site) for layer in (0, 1) for site in (Site.ATTN_RESIDUAL, Site.OUTPUT)]


def test_stream_is_proved_by_its_sum(model: Model, opened: Open) -> None:
    capture = opened(model)
    assert held_sites(capture) == ALL
    assert torch.equal(capture.read(1, Site.OUTPUT)[0], model["model.layers.1"])
    assert any("bit for bit" in note for note in capture.notes)


def test_sum_stands_for_an_output_that_is_not_held(model: Model, opened: Open) -> None:
    last = model.pop("model.layers.1")
    first = model.pop("model.layers.0")
    capture = opened(model)
    assert held_sites(capture) == ALL
    assert torch.equal(capture.read(0, Site.OUTPUT)[0], first)
    assert torch.equal(capture.read(1, Site.OUTPUT)[0], last)
    # Read again, and in another order.
    assert torch.equal(capture.read(0, Site.OUTPUT)[0], first)


def test_stream_that_is_no_sum_is_proved_by_the_norm_that_reads_it(model: Model, opened: Open) -> None:
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
def test_stream_without_an_addend_is_refused(missing: str, model: Model, opened: Open) -> None:
    """The massive channel hides what lacks from any figure of the whole tensor."""
    model["model.layers.0"] = model["model.layers.0"] - model[missing]
    without_norms = {name: held for name, held in model.items() if not name.endswith("norm")}
    capture = opened(without_norms)
    assert (0, Site.OUTPUT) not in held_sites(capture)
    assert any("sites: {output:" in note for note in capture.notes)


def test_norm_of_another_stream_proves_nothing(model: Model, opened: Open) -> None:
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


def test_too_few_tokens_prove_nothing_by_a_norm(model: Model, opened: Open) -> None:
    del model["model.layers.0"], model["model.layers.1"]
    assert held_sites(opened(model, [0, 1, 2, *[2] * (T - 3)])) == []


def test_tokens_that_are_all_alike_prove_nothing_by_a_norm(model: Model, opened: Open) -> None:
    """A warm-up of one token over and over: whatever a norm is given, one weight fits all its tokens."""
    del model["model.layers.0"], model["model.layers.1"]
    model["model.layers.0.mlp"] = model["model.layers.0.mlp"] * 3
    rounding = 1 + 2**-8 * (torch.arange(T)[:, None] % 2)
    alike = {name: (held[:1] * rounding).to(held.dtype) for name, held in model.items()}
    assert held_sites(opened(alike)) == []


def test_warm_up_of_tokens_that_are_all_alike_leaves_the_proof_to_another_pass(
    model: Model, tmp_path: Path, opened: Open, write_pass: Callable[..., None]
) -> None:
    del model["model.layers.0"], model["model.layers.1"]
    warm = {name: held[:1].repeat(8, 1) for name, held in model.items()}
    write_pass(tmp_path / "dp0/prefill_s8_0", warm, positions=range(8), requests=["warm-up"])
    assert held_sites(opened(model)) == ALL


def test_addends_of_other_widths_prove_nothing(model: Model, opened: Open) -> None:
    model["model.layers.0.self_attn"] = torch.nn.functional.pad(model["model.layers.0.self_attn"], (0, 8))
    capture = opened(model)
    # The norm behind still proves what the layers return.
    assert held_sites(capture) == [(0, Site.OUTPUT), (1, Site.ATTN_RESIDUAL), (1, Site.OUTPUT)]
