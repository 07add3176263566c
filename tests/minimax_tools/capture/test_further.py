"""Further outputs: what a place of a layer gives, by the name that was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from minimax_tools.capture.further import (
    FurtherPlace,
    FurtherRecorder,
    parse_further,
    require_further,
    verify_further,
)
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.recorder import copy_to_host
from minimax_tools.errors import CaptureError, TargetError, UsageError

STATES = torch.arange(4.0).reshape(1, 2, 2)


class Attention(nn.Module):
    def forward(self, states: torch.Tensor, *, cos: torch.Tensor) -> dict[str, Any]:
        return {"context": states * cos, "weights": (cos, None)}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.spare = Attention(), nn.Identity()

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], str]:
        context = self.attention(states, cos=torch.full((2,), 2.0))["context"]
        return context, (states + 1, states + 2), "cpu"


def keep(*texts: str) -> dict[str, torch.Tensor]:
    layer, places = Layer(), parse_further(texts)
    verify_further(layer, places, what="the layer")
    with FurtherRecorder(layer, places, keep=copy_to_host) as recorder:
        layer(STATES)
    assert not layer.attention._forward_hooks
    require_further(places, recorder.tensors, what="the layer")
    return recorder.tensors


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("cache=:output[1]", ["cache.0", "cache.1"]),
        ("all=:output", ["all.0", "all.1.0", "all.1.1"]),
        ("in=:input", ["in"]),
        ("attn=attention", ["attn.context", "attn.weights.0"]),
        ("c=attention:output[context]", ["c"]),
        ("given=attention:input", ["given.0", "given.cos"]),
        ("cos=attention:input[cos]", ["cos"]),
        ("cos=attention:input[1]", ["cos"]),
    ],
)
def test_tensors_at_a_place_have_its_name(text: str, names: list[str]) -> None:
    assert list(keep(text)) == names


def test_values_are_those_of_the_place() -> None:
    kept = keep("cache=:output[1]", "cos=attention:input[cos]", "context=attention:output[context]")
    assert torch.equal(kept["cache.1"], STATES + 2)
    assert torch.equal(kept["cos"], torch.full((2,), 2.0))
    assert torch.equal(kept["context"], STATES * 2)


@pytest.mark.parametrize(
    ("texts", "fault"),
    [
        *((text, "cannot be read") for text in ("name", "=:output", "a b=moe", "a.b=moe", "a=moe:out")),
        ("a=moe[0:2]", "cannot be cut"),
        ("moe_delta=moe", "has the name of a site"),
        ("a=moe a=attn", "two further outputs have one name: a=moe, a=attn"),
    ],
)
def test_other_texts_are_refused(texts: str, fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        parse_further(texts.split())


@pytest.mark.parametrize("text", ["a=spare", "a=:output[2]", "a=:output[9]", "a=attention:output[other]"])
def test_a_place_without_a_tensor_is_named(text: str) -> None:
    with pytest.raises(TargetError, match="the layer showed no tensor at the further output a="):
        keep(text)


def test_pieces_of_ranks_are_joined_by_their_layout_or_kept_apart() -> None:
    first, second = {"a": torch.zeros(1, 2)}, {"a": torch.ones(1, 2)}
    whole = FurtherPlace.parse("a=moe@shard(0)").join([first, second], what="the layer")
    assert torch.equal(whole["a"], torch.tensor([[0.0, 0], [1, 1]]))
    plain = FurtherPlace.parse("a=moe")
    assert set(plain.join([first, second], what="the layer")) == {"a.rank0", "a.rank1"}
    assert set(plain.join([first, first], what="the layer")) == {"a"}
    assert set(plain.join([first, {}], what="the layer")) == {"a.rank0"}


def test_they_are_stored_beside_the_sites_with_digests(recipe: Any, tmp_path: Any) -> None:
    kept = {"cache.0": torch.ones(2, 3), "cache.1": torch.zeros(2, 3)}
    with recipe.open(tmp_path) as writer:
        writer.write(0, recipe.layer(0), further=kept)
        writer.write(1, recipe.layer(1))
    capture = Capture.open(tmp_path)
    assert (capture.further(0), capture.further(1)) == (("cache.0", "cache.1"), ())
    assert torch.equal(capture.read_further(0, "cache.0"), kept["cache.0"])
    with pytest.raises(CaptureError, match=r"further output other of layer 0: expected cache.0, cache.1"):
        capture.read_further(0, "other")
    file = tmp_path / "layer_0.further.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CaptureError, match=r"the further output cache.1 of layer 0"):
        Capture.open(tmp_path).read_further(0, "cache.1")
