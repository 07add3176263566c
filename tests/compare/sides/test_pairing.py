from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from minimax_tools.capture.manifest import Description
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import Component, component_run, multi_layer_run, single_layer_run, sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.results.results import Comparison, Verdict

Judge = Callable[..., Comparison]


def changed(inputs: Inputs, name: str, place: tuple[int, int], value: int) -> Inputs:
    tensor = inputs.tensors()[name].clone()
    tensor[place] = value
    return replace(inputs, **{name: tensor})


class TestInputs:
    @pytest.mark.parametrize("name", ["input_ids", "position_ids"])
    def test_other_tokens_and_positions_are_named(self, name: str, copyist: Any, judge: Judge) -> None:
        inputs = copyist.source.read_inputs()
        target = copyist.device_run(inputs=changed(inputs, name, (1, 7), 99))
        was = int(inputs.tensors()[name][1, 7])
        sentence = (
            f"the captures have different inputs: {name} differ, first at row 1, token 7: "
            f"{was} in the golden, 99 in the run"
        )
        with pytest.raises(IncomparableError, match=sentence):
            judge(target)

    def test_other_mask_is_named(self, copyist: Any, judge: Judge) -> None:
        inputs = changed(copyist.source.read_inputs(), "attention_mask", (1, 33), 1)
        with pytest.raises(
            IncomparableError, match="inputs: attention_mask differs, first at row 1, token 33"
        ):
            judge(copyist.device_run(inputs=inputs))

    def test_other_batch_is_named(self, copyist: Any, judge: Judge) -> None:
        inputs = copyist.source.read_inputs()
        shorter = {name: tensor[:, :40] for name, tensor in inputs.tensors().items()}
        with pytest.raises(
            IncomparableError, match="2x48 tokens with padding in the golden, 2x40 in the run"
        ):
            judge(copyist.device_run(inputs=replace(inputs, **shorter)))

    @pytest.mark.parametrize("name", ["input_ids", "position_ids"])
    def test_other_padding_is_no_other_input(self, name: str, copyist: Any, judge: Judge) -> None:
        inputs = changed(copyist.source.read_inputs(), name, (1, 40), 99)
        assert judge(copyist.device_run(inputs=inputs)).verdict is Verdict.PASS

    def test_manifest_that_describes_other_inputs_than_are_stored_is_refused(
        self, copyist: Any, judge: Judge
    ) -> None:
        def lie(description: Description) -> Description:
            return replace(description, inputs_digest="0" * 64)

        with pytest.raises(CaptureError, match=r"inputs\.safetensors does not match its manifest"):
            judge(copyist.device_run(describe=lie))


class TestModel:
    @staticmethod
    def of_other_model(**changes: Any) -> Callable[[Description], Description]:
        def describe(description: Description) -> Description:
            model = replace(description.provenance.model, **changes)
            return replace(description, provenance=replace(description.provenance, model=model))

        return describe

    def test_other_config_is_named(self, copyist: Any, judge: Judge) -> None:
        target = copyist.device_run(describe=self.of_other_model(spec_digest="1" * 64))
        with pytest.raises(IncomparableError, match=r"are of different models: found config\.json differs"):
            judge(target)

    def test_other_values_of_one_layer_are_named(self, copyist: Any, judge: Judge) -> None:
        layers = {**copyist.source.description.provenance.model.layers, 2: "1" * 64}
        target = copyist.device_run(describe=self.of_other_model(layers=layers))
        with pytest.raises(IncomparableError, match="layer 2 has other norms, router gate or bias"):
            judge(target)

    def test_layers_that_only_one_side_ran_are_no_difference(self, copyist: Any, judge: Judge) -> None:
        layers = {1: copyist.source.description.provenance.model.layers[1]}
        target = copyist.device_run(
            run=single_layer_run(1, sites_level="all"), describe=self.of_other_model(layers=layers)
        )
        assert judge(target).verdict is Verdict.PASS

    def test_other_dtype_is_named(self, copyist: Any, judge: Judge) -> None:
        def in_float32(description: Description) -> Description:
            return replace(
                description, provenance=replace(description.provenance, dtypes={"weights": "float32"})
            )

        sentence = r"computed in different dtypes: expected bfloat16 \(golden\), found float32"
        with pytest.raises(IncomparableError, match=sentence):
            judge(copyist.device_run(describe=in_float32))


class TestFeed:
    @staticmethod
    def other(tensor: torch.Tensor) -> torch.Tensor:
        tensor[0, 3, 5] += 1.0
        return tensor

    @pytest.mark.parametrize("layer", [0, 2])
    def test_isolated_layer_that_was_fed_something_else_is_refused(
        self, layer: int, copyist: Any, judge: Judge
    ) -> None:
        target = copyist.device_run({(layer, Site.INPUT): self.other})
        sentence = f"the captures have different inputs: layer {layer} got other hidden states"
        with pytest.raises(IncomparableError, match=sentence):
            judge(target)
        assert judge(target, pattern="layer_1").verdict is Verdict.PASS

    def test_input_that_differs_on_padding_alone_is_the_goldens(self, copyist: Any, judge: Judge) -> None:
        def other_padding(tensor: torch.Tensor) -> torch.Tensor:
            tensor[1, 33:] = torch.nan
            return tensor

        target = copyist.device_run({(2, Site.INPUT): other_padding})
        assert judge(target).verdict is Verdict.PASS

    def test_chained_run_must_begin_with_the_goldens_input(self, copyist: Any, judge: Judge) -> None:
        run = multi_layer_run(Span(1, 4), sites_level="all")
        target = copyist.device_run({(1, Site.INPUT): self.other}, run=run)
        with pytest.raises(IncomparableError, match="layer 1 got other hidden states"):
            judge(target)

    def test_component_that_was_fed_something_else_is_refused(self, copyist: Any, judge: Judge) -> None:
        run = component_run(1, Component.MOE)
        target = copyist.device_run({(1, Site.POST_NORM): self.other}, run=run)
        with pytest.raises(IncomparableError, match="layer 1 got other post_norm"):
            judge(target)

    def test_component_that_wants_its_feed_in_another_dtype_is_fed_the_same(
        self, copyist: Any, judge: Judge
    ) -> None:
        run = component_run(1, Component.EXPERTS)
        changes = {
            (1, Site.ROUTER_WEIGHTS): torch.Tensor.bfloat16,
            (1, Site.ROUTER_EXPERTS): torch.Tensor.int,
        }
        assert judge(copyist.device_run(changes, run=run)).verdict is Verdict.PASS

    def test_run_that_does_not_hold_what_it_was_fed_is_refused(self, copyist: Any, judge: Judge) -> None:
        target = copyist.device_run({(2, Site.INPUT): None}, run=sweep_run(Span(2, 4), sites_level="all"))
        with pytest.raises(IncomparableError, match="device does not hold the input of layer 2"):
            judge(target)
