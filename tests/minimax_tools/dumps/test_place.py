from __future__ import annotations

import pytest
import torch

from minimax_tools.dumps.piece import DumpPiece, SitePlace
from minimax_tools.errors import CaptureError, UsageError
from minimax_tools.model.site_layouts import Partial, Replicated, Sharded


def piece(element: str, *, point: str = "output") -> DumpPiece:
    return DumpPiece(
        file="file.pt",
        keys=(),
        module="layers.0",
        point=point,
        element=element,
        step="0",
        rank=0,
        shape=(2, 3),
        dtype="bfloat16",
    )


class TestParse:
    @pytest.mark.parametrize(
        ("text", "place"),
        [
            ("lm_head", SitePlace(path="lm_head")),
            ("lm_head[0:8]", SitePlace(path="lm_head", part=(0, 8))),
            ("a.b:input", SitePlace(path="a.b", point="input")),
            ("a.b:input[hidden_states]", SitePlace(path="a.b", point="input", element="hidden_states")),
            (":output[logits]", SitePlace(path="", element="logits")),
            ("a@partial", SitePlace(path="a", layout=Partial())),
            ("a:output@replicate", SitePlace(path="a", layout=Replicated())),
            (
                "layers.{layer}.qkv:output[1][768:896]@shard(-1; 0,0,1,1)",
                SitePlace(
                    path="layers.{layer}.qkv",
                    element="1",
                    part=(768, 896),
                    layout=Sharded(dim=-1, blocks=(0, 0, 1, 1)),
                ),
            ),
        ],
    )
    def test_parts_may_be_left_out(self, text: str, place: SitePlace) -> None:
        assert SitePlace.read(text) == place
        assert SitePlace.read(str(place)) == place

    @pytest.mark.parametrize("text", ["a:middle", "a[0]", "a:output[0", "a[3:x]", "{layer}.{layer}"])
    def test_other_words_are_refused(self, text: str) -> None:
        with pytest.raises(UsageError, match="cannot be read: expected 'layers"):
            SitePlace.read(text)


class TestFindLayers:
    def test_whole_path_or_its_end_is_meant(self) -> None:
        modules = ("model.layers.0.mlp", "model.layers.11.mlp", "model.layers.0.mlp.gate", "mlp")
        found = SitePlace.read("layers.{layer}.mlp").find_layers(modules)
        assert found == {0: "model.layers.0.mlp", 11: "model.layers.11.mlp"}

    def test_next_layer_means_the_one_before(self) -> None:
        modules = ("layers.0", "layers.1", "layers.2")
        assert SitePlace.read("layers.{next}:input").find_layers(modules) == {0: "layers.1", 1: "layers.2"}

    def test_name_inside_a_layer_is_not_the_models(self) -> None:
        assert SitePlace.read("norm").find_layers(("model.layers.0.norm", "model.norm")) == {
            None: "model.norm"
        }

    @pytest.mark.parametrize(
        "modules", [("draft.norm", "norm"), ("norm", "draft.norm"), ("draft.norm", "model.norm", "norm")]
    )
    def test_exact_path_goes_before_the_end_of_another(self, modules: tuple[str, ...]) -> None:
        assert SitePlace.read("norm").find_layers(modules) == {None: "norm"}

    def test_two_modules_for_one_layer_are_refused(self) -> None:
        with pytest.raises(
            CaptureError, match=r"means two modules: found draft\.layers\.0 and model\.layers\.0"
        ):
            SitePlace.read("layers.{layer}").find_layers(("draft.layers.0", "model.layers.0"))

    def test_dots_of_a_path_are_dots(self) -> None:
        assert SitePlace.read("layers.{layer}.a_b").find_layers(("layers.0xa_b", "layers.0.a.b")) == {}


class TestChoose:
    def test_first_of_several_is_the_usual_one(self) -> None:
        pieces = [piece("1"), piece("0"), piece("0", point="input")]
        assert SitePlace.read("layers.{layer}").choose(pieces) == (pieces[1],)
        assert SitePlace.read("layers.{layer}:output[1]").choose(pieces) == (pieces[0],)
        assert SitePlace.read("layers.{layer}:input").choose(pieces) == (pieces[2],)

    def test_first_of_one_is_that_one(self) -> None:
        assert SitePlace.read("layers.{layer}:output[0]").choose([piece("")]) == (piece(""),)
        assert SitePlace.read("layers.{layer}:output[1]").choose([piece("")]) == ()


def test_part_beyond_the_tensor_is_refused() -> None:
    assert SitePlace.read("a[1:3]").cut(torch.arange(8).reshape(2, 4), what="q").tolist() == [[1, 2], [5, 6]]
    with pytest.raises(CaptureError, match=r"q cannot be cut .*expected at least 9 .*found \[2, 8\]"):
        SitePlace.read("a[1:9]").cut(torch.zeros(2, 8), what="q")
