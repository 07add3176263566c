from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from minimax_tools.capture.manifest import Description
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import (
    Component,
    Run,
    component_run,
    multi_layer_run,
    single_layer_run,
    sweep_run,
)
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.results.results import Comparison, Verdict

Judge = Callable[..., Comparison]

ONE_LAYER = single_layer_run(1, sites_level="all")


def changed(inputs: Inputs, name: str, place: tuple[int, int], value: int) -> Inputs:
    tensor = inputs.tensors()[name].clone()
    tensor[place] = value
    return replace(inputs, **{name: tensor})


class TestInputs:
    @pytest.mark.parametrize(
        ("name", "place", "words"),
        [
            ("input_ids", (1, 7), "input_ids differ, first at row 1, token 7: {was} in the golden"),
            ("position_ids", (1, 7), "position_ids differ, first at row 1, token 7: {was} in the golden"),
            ("attention_mask", (1, 33), "attention_mask differs, first at row 1, token 33"),
        ],
    )
    def test_others_are_named(self, name: str, place: Any, words: str, copyist: Any, judge: Judge) -> None:
        inputs = copyist.source.read_inputs()
        value = 1 if name == "attention_mask" else 99
        target = copyist.device_run(inputs=changed(inputs, name, place, value), run=ONE_LAYER)
        told = words.format(was=int(inputs.tensors()[name][place]))
        with pytest.raises(IncomparableError, match=f"the captures have different inputs: {told}"):
            judge(target)

    def test_other_batch_is_named(self, copyist: Any, judge: Judge) -> None:
        inputs = copyist.source.read_inputs()
        shorter = {name: tensor[:, :40] for name, tensor in inputs.tensors().items()}
        target = copyist.device_run(inputs=replace(inputs, **shorter), run=ONE_LAYER)
        with pytest.raises(IncomparableError, match="2x48 tokens with padding in the golden, 2x40 in"):
            judge(target)

    def test_other_padding_is_no_other_input(self, copyist: Any, judge: Judge) -> None:
        inputs = changed(copyist.source.read_inputs(), "input_ids", (1, 40), 99)
        inputs = changed(inputs, "position_ids", (1, 40), 99)

        def other_padding(tensor: torch.Tensor) -> torch.Tensor:
            tensor[1, 33:] = torch.nan
            return tensor

        changes = {(1, Site.INPUT): other_padding}
        target = copyist.device_run(changes, inputs=inputs, run=ONE_LAYER)
        assert judge(target).verdict is Verdict.PASS

    def test_manifest_of_other_inputs_than_are_stored_is_refused(self, copyist: Any, judge: Judge) -> None:
        def lie(description: Description) -> Description:
            return replace(description, inputs_digest="0" * 64)

        with pytest.raises(CaptureError, match=r"inputs\.safetensors does not match its manifest"):
            judge(copyist.device_run(describe=lie, run=ONE_LAYER))


class TestModel:
    @staticmethod
    def judge_other(
        copyist: Any, judge: Judge, *, run: Run = ONE_LAYER, name: str = "device", **changes: Any
    ) -> Comparison:
        """Judge a run of another model."""

        def describe(description: Description) -> Description:
            model = replace(description.provenance.model, **changes)
            return replace(description, provenance=replace(description.provenance, model=model))

        return judge(copyist.device_run(run=run, describe=describe, name=name))

    def test_other_config_and_other_values_of_one_layer_are_named(self, copyist: Any, judge: Judge) -> None:
        with pytest.raises(IncomparableError, match=r"are of different models: found config\.json differs"):
            self.judge_other(copyist, judge, spec_digest="1" * 64)
        layers = {**copyist.source.description.provenance.model.layers, 1: "1" * 64}
        with pytest.raises(IncomparableError, match="layer 1 has other norms, router gate or bias"):
            self.judge_other(copyist, judge, name="other", layers=layers)

    def test_layers_that_only_one_side_ran_are_no_difference(self, copyist: Any, judge: Judge) -> None:
        layers = {1: copyist.source.description.provenance.model.layers[1]}
        assert self.judge_other(copyist, judge, layers=layers).verdict is Verdict.PASS

    def test_sites_that_the_goldens_graph_lacks_are_named(self, copyist: Any, judge: Judge) -> None:
        shared = ModelGraph(shared_width=64)
        run = single_layer_run(1, sites_level="all", graph=shared)
        target = copyist.device_run(run=run, not_exposed=(Site.ROUTED_DELTA, Site.SHARED_DELTA))
        with pytest.raises(
            IncomparableError, match=r"layer 1 .* another kind .* found routed_delta, shared_delta"
        ):
            judge(target)

    def test_other_dtype_is_named(self, copyist: Any, judge: Judge) -> None:
        def in_float32(description: Description) -> Description:
            provenance = replace(description.provenance, dtypes={"weights": "float32"})
            return replace(description, provenance=provenance)

        sentence = r"computed in different dtypes: expected bfloat16 \(golden\), found float32"
        with pytest.raises(IncomparableError, match=sentence):
            judge(copyist.device_run(describe=in_float32, run=ONE_LAYER))


class TestFeed:
    @staticmethod
    def other(tensor: torch.Tensor) -> torch.Tensor:
        tensor[0, 3, 5] += 1.0
        return tensor

    @pytest.mark.parametrize("layer", [0, 2])
    def test_layer_that_was_fed_something_else_is_refused(
        self, layer: int, copyist: Any, judge: Judge
    ) -> None:
        target = copyist.device_run({(layer, Site.INPUT): self.other})
        sentence = f"the captures have different inputs: layer {layer} got other hidden states"
        with pytest.raises(IncomparableError, match=sentence):
            judge(target)
        assert judge(target, pattern="layer_1").verdict is Verdict.PASS

    @pytest.mark.parametrize(
        ("run", "site", "words"),
        [
            (multi_layer_run(Span(1, 4), sites_level="all"), Site.INPUT, "hidden states"),
            (component_run(1, Component.MOE), Site.POST_NORM, "post_norm"),
        ],
    )
    def test_chain_and_component_must_begin_with_what_the_golden_was_fed(
        self, run: Run, site: Site, words: str, copyist: Any, judge: Judge
    ) -> None:
        with pytest.raises(IncomparableError, match=f"layer 1 got other {words}"):
            judge(copyist.device_run({(1, site): self.other}, run=run))

    def test_component_may_be_fed_in_another_dtype(self, copyist: Any, judge: Judge) -> None:
        changes = {
            (1, Site.ROUTER_WEIGHTS): torch.Tensor.bfloat16,
            (1, Site.ROUTER_EXPERTS): torch.Tensor.int,
        }
        target = copyist.device_run(changes, run=component_run(1, Component.EXPERTS))
        assert judge(target).verdict is Verdict.PASS

    def test_run_that_does_not_hold_what_it_was_fed_is_refused(self, copyist: Any, judge: Judge) -> None:
        target = copyist.device_run({(2, Site.INPUT): None}, run=sweep_run(Span(2, 4), sites_level="all"))
        with pytest.raises(IncomparableError, match="device does not hold the input of layer 2"):
            judge(target)
