"""Layers that share a finding are told once, with what cannot be told from it."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from compare.diagnosis.finding import LayerDiagnosis, MistakeFinding, PassedOver
from compare.diagnosis.layer_group import group_layers, withdraw_rare, withdraw_unequal
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Blame

SWAPPED = "gate_up_swapped"


def finding(
    layer: int, mistake: str = SWAPPED, *, leaves: float = 1.0, **parameters: float | str
) -> MistakeFinding:
    return MistakeFinding(
        layer=layer,
        mistake=mistake,
        parameters=MappingProxyType(dict(parameters)),
        explains=0.99,
        leaves=leaves,
        amplitude=1.0,
        z=300.0,
        what="Gate and up are swapped.",
        look_at="the order of w1 and w3",
    )


def layer(
    number: int,
    *named: MistakeFinding,
    nearest: tuple[MistakeFinding, ...] = (),
    unexplained: float = 100.0,
    notes: tuple[str, ...] = (),
    is_blamed: bool = True,
    site: str = "moe_delta",
) -> LayerDiagnosis:
    blame = Blame(layer=number, sites=(site,), reason="error 9×", right=("post_norm",))
    return LayerDiagnosis(
        blame=(blame,) if is_blamed else (),
        layer=number,
        sites=(Site.MOE_DELTA,),
        unexplained=unexplained,
        named=named,
        nearest=nearest,
        num_hypotheses=12,
        is_blamed=is_blamed,
        notes=notes,
    )


class TestGroups:
    def test_layers_of_one_mistake_belong_together(self) -> None:
        layers = (layer(3, finding(3)), layer(4, finding(4, "o_proj_zero")), layer(5, finding(5)))
        assert [group.numbers for group in group_layers(layers)] == [(3, 5), (4,)]

    def test_layers_of_a_wrong_shape_alone_belong_together(self) -> None:
        layers = [replace(layer(number), is_of_shape=number != 1) for number in range(3)]
        assert [group.numbers for group in group_layers(layers)] == [(0, 2), (1,)]

    def test_fitted_parameters_may_differ_a_little(self) -> None:
        factors = (0.350, 0.354, 0.8)
        layers = [
            layer(number, finding(number, "k_norm_scaled", factor=factor))
            for number, factor in enumerate(factors)
        ]
        assert [group.numbers for group in group_layers(layers)] == [(0, 1), (2,)]

    def test_other_parameters_may_not_differ(self) -> None:
        layers = [layer(n, finding(n, "fp8_scale_missing", tensor=t)) for n, t in enumerate(("w1", "w2"))]
        assert [group.numbers for group in group_layers(layers)] == [(0,), (1,)]

    def test_layer_in_which_the_mistake_comes_second_belongs_to_it_too(self) -> None:
        first = layer(0, finding(0, "q_norm_scaled"), finding(0, "k_norm_scaled"))
        second = layer(1, finding(1, "k_norm_scaled"), finding(1, "q_norm_scaled"))
        [group] = group_layers((first, second))
        assert [one.mistake for one in group.named] == ["q_norm_scaled"] * 2
        assert [[one.mistake for one in other] for other in group.others] == [["k_norm_scaled"] * 2]

    def test_layers_that_nothing_explains_are_apart_from_those_that_something_does(self) -> None:
        layers = (layer(0, finding(0)), layer(1, nearest=(finding(1),)), layer(2, site="k_norm"), layer(3))
        assert [group.numbers for group in group_layers(layers)] == [(0,), (1, 3), (2,)]

    def test_no_layer_is_lost(self) -> None:
        layers = [layer(n, finding(n, f"mistake_{n % 3}")) for n in range(9)]
        assert sorted(number for group in group_layers(layers) for number in group.numbers) == list(range(9))


class TestUnequalNames:
    def test_each_factor_that_differs_by_layer_is_taken_back_and_told(self) -> None:
        first, second = withdraw_unequal(
            [
                layer(
                    number,
                    finding(number, "moe_delta_scaled", factor=factor),
                    finding(number, "router_weights_scaled", factor=factor),
                    finding(number),
                )
                for number, factor in enumerate((1.1, 1.5))
            ]
        )
        assert [one.mistake for one in first.named] == [one.mistake for one in second.named] == [SWAPPED]
        assert first.notes == (
            "moe_delta_scaled comes near, but would need another factor in each layer: 1.1 to 1.5; "
            "router_weights_scaled comes near, but would need another factor in each layer: 1.1 to 1.5",
        )


class TestRareNames:
    def test_name_of_fewer_layers_than_nothing_explains_is_taken_back(self) -> None:
        named, other = layer(0, finding(0)), layer(1)
        (first, second) = withdraw_rare([named, other], ())
        assert (first.named, first.nearest, second) == ((), named.named, other)
        assert first.notes == (
            f"{SWAPPED} comes near here alone: at the same sites of layer 1 it explains nothing",
        )
        assert withdraw_rare([named, layer(2, finding(2)), other], ())[0] is named
        # Elsewhere, something else may be wrong.
        assert withdraw_rare([named, layer(1, site="attn_context")], ())[0] is named

    def test_layer_that_a_mistake_without_a_number_nearly_explains_does_not_count(self) -> None:
        missing = "qk_norm_missing"
        named = layer(0, finding(0, missing))
        assert withdraw_rare([named, layer(1, nearest=(finding(1, missing),))], ())[0] is named
        scaled = layer(0, finding(0, "moe_delta_scaled", factor=1.1))
        near = layer(1, nearest=(finding(1, "moe_delta_scaled", factor=1.1),))
        assert withdraw_rare([scaled, near], ())[0].named == ()

    def test_layers_that_were_passed_over_count(self) -> None:
        layers = [layer(0, finding(0)), layer(1, finding(1)), layer(2), layer(3)]
        passed = PassedOver(layers=(4, 5), like=(2, 3))
        assert [one.named for one in withdraw_rare(layers, (passed,))] == [(), (), (), ()]
        more = [*layers, layer(6, finding(6))]
        assert withdraw_rare(more, ())[0].named
        assert not withdraw_rare(more, (passed,))[0].named
