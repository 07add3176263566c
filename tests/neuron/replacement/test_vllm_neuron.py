"""Runs by hand on vLLM Neuron: the plugin's own steps, on a stand-in, from the files to the wrong layer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import TargetError
from minimax_tools.model.spec import ModelSpec
from neuron.devices.ranks import Ranks
from neuron.devices.runtime import open_runtime
from neuron.devices.weights import WeightLoader
from neuron.ports.packed_request import bucket_of
from neuron.ports.targets import find_model_target
from neuron.ports.vllm_neuron_stream import point_name, replace_stream
from neuron.replacement.vllm_neuron_run import run_replaced

PORTS = Path(__file__).parents[2] / "ports"
# Models that take another stream, as the printed lines say.
SOURCE = f"""
import sys
sys.path.insert(0, {str(PORTS)!r})
import vllm_neuron_port
from vllm_neuron_port import Backbone, _SummandBackbone
from neuron.ports.vllm_neuron_stream import point_name, replace_stream, replace_summands

class Replacing(Backbone):
    def run_layers(self, hidden_states, positions, embeddings, attn_metadata):
        for i, layer in enumerate(self.layers):
            hidden_states = replace_stream(hidden_states, point_name(i, num_layers=4))
            hidden_states = layer(
                hidden_states, positions=positions, position_embeddings=embeddings, attn_metadata=attn_metadata
            )
        return self.norm(replace_stream(hidden_states, point_name(4, num_layers=4)))

class ReplacingSummands(_SummandBackbone):
    def run_layers(self, hidden_states, positions, embeddings, attn_metadata):
        residual = None
        for i, layer in enumerate(self.layers):
            hidden_states, residual = replace_summands(hidden_states, residual, point_name(i, num_layers=4))
            hidden_states, residual = layer(positions, hidden_states, residual, embeddings, attn_metadata)
        hidden_states, residual = replace_summands(hidden_states, residual, point_name(4, num_layers=4))
        return self.norm(hidden_states, residual)[0]

class Right(vllm_neuron_port.MiniMaxM2ForCausalLM):
    backbone_class = Replacing

class Swapped(vllm_neuron_port.Swapped):
    backbone_class = Replacing

class SwappedSummands(vllm_neuron_port.Swapped):
    backbone_class = ReplacingSummands
"""


class Engine:
    """An engine whose runner replaces tensors: of each request it prefills the tokens, and returns one more."""

    def __init__(self, name: str, *, model: Path, options: dict[str, str]) -> None:
        from vllm_neuron.accuracy.tensor_replacement import TensorReplacer

        spec = ModelSpec.from_folder(model)
        target = find_model_target(name)
        self.model: Any = target.build(spec, dtype=torch.bfloat16, ranks=Ranks())
        loader = WeightLoader(torch.device("cpu"), wait=lambda: None, pool=ReadingPool(1))
        with CheckpointReader(model) as reader:
            target.load(self.model, reader, spec, dtype=torch.bfloat16, loader=loader)
        self.replacer = TensorReplacer(
            torch.load(options["tensors_path"], weights_only=False),
            prompt_token_ids=torch.load(options["prompt_token_ids_path"], weights_only=False),
        )

    def generate(self, requests: list[dict[str, list[int]]], parameters: Any) -> list[Any]:
        assert (parameters.max_tokens, parameters.logprobs) == (1, -1)
        return [self.run(str(number), one["prompt_token_ids"]) for number, one in enumerate(requests)]

    def run(self, req_id: str, token_ids: list[int]) -> Any:
        from vllm_neuron.accuracy.tensor_replacement import set_active_context

        positions = list(range(len(token_ids)))
        padding = [positions[-1]] * (bucket_of(len(token_ids)) - len(token_ids))
        self.replacer.register_request(req_id, token_ids)
        set_active_context(self.replacer.build_context([req_id], positions + padding, is_prefill=True))
        with torch.no_grad():
            ids = torch.tensor([token_ids])
            result = self.model(ids, torch.ones_like(ids), torch.tensor([positions]))
        set_active_context(None)
        found = result["logits"][0, -1].float().log_softmax(-1).tolist()
        logprobs = {token: SimpleNamespace(logprob=value) for token, value in enumerate(found)}
        return SimpleNamespace(outputs=[SimpleNamespace(logprobs=[logprobs])])


@pytest.fixture
def search(run: Any, tmp_path: Path, small_fp8: Path, on_small: Any, vllm_neuron: Path) -> Any:
    """Makes all runs that the command asks for: its last record, and the points."""
    file, folder = tmp_path / "replacing_port.py", tmp_path / "replaced"
    file.write_text(SOURCE)

    def make_runs(name: str) -> tuple[Any, list[int | None]]:
        points = []
        while True:
            arguments = ("replacement", *on_small, "--format", "vllm-neuron")
            result = run(*arguments, "--output-dir", folder, "--decode", 6, "--json", "--quiet")
            record = json.loads(result.stdout)
            if record["is_finished"]:
                return record, points
            assert result.exit_code == 3
            point = record["waits_for"]["point"]
            points.append(point)
            (line,) = [line for line in record["lines"] if "additional_config" in line]
            options = json.loads(line.partition("=")[2].rstrip(","))["neuron_config"]["tensor_replacement"]
            with open_runtime("cpu", ranks=Ranks()):
                engine = Engine(f"vllm-neuron:{file}:{name}", model=small_fp8, options=options)
                run_replaced(engine, folder, point=point)

    return make_runs


def test_right_model_is_not_blamed(search: Any) -> None:
    record, points = search("Right")
    assert (record["verdict"], points) == ("pass", [2, 1, 0, None])


@pytest.mark.parametrize("name", ["Swapped", "SwappedSummands"])
def test_wrong_layer_is_named_in_runs_by_hand_and_by_mm2_itself(
    search: Any, on_small: Any, run: Any, tmp_path: Path, name: str
) -> None:
    record, points = search(name)
    assert (record["verdict"], points) == ("fail", [2, 4, 3])
    assert [blame["layer"] for blame in record["blame"]] == [2]
    target = f"vllm-neuron:{PORTS / 'vllm_neuron_port.py'}:{name}"
    arguments = ("bisect", "--whole", *on_small, "--target", target, "--backend", "cpu")
    result = run(*arguments, "--output-dir", tmp_path / "search", "--decode", 3, "--json", "--quiet")
    assert result.exit_code == 1, result.stderr
    assert [blame["layer"] for blame in json.loads(result.stdout)["blame"]] == [2]


class TestReplaceStream:
    STATES = torch.arange(8.0).reshape(4, 2)

    @pytest.fixture
    def context(self, vllm_neuron: Path) -> Any:
        from vllm_neuron.accuracy.tensor_replacement import set_active_context

        return set_active_context

    def values(self) -> dict[str, torch.Tensor]:
        mask = torch.tensor([1.0, 1.0, 1.0, 0.0])[:, None]
        return {"model.layers.1.input": -torch.ones(4, 2), "model.layers.1.input.mask": mask}

    def test_padding_and_other_points_keep_their_own(self, context: Any) -> None:
        context(self.values())
        found = replace_stream(self.STATES, point_name(1, num_layers=2))
        assert found.tolist() == [[-1.0, -1.0]] * 3 + [[6.0, 7.0]]
        assert replace_stream(self.STATES, point_name(2, num_layers=2)) is self.STATES
        context(None)
        assert replace_stream(self.STATES, point_name(1, num_layers=2)) is self.STATES

    def test_ranks_take_their_part_of_the_tokens(self, context: Any) -> None:
        context(self.values())
        name = point_name(1, num_layers=2)
        parts = [replace_stream(part, name, rank=rank) for rank, part in enumerate(self.STATES.chunk(2))]
        assert torch.equal(torch.cat(parts), replace_stream(self.STATES, name))
        # In a decoding step each rank has all tokens.
        assert torch.equal(replace_stream(self.STATES, name, rank=1), replace_stream(self.STATES, name))


def test_engine_without_the_whole_vocabulary_is_refused(
    run: Any, tmp_path: Path, on_small: Any, vllm_neuron: Path
) -> None:
    class Engine:
        def generate(self, requests: list[Any], parameters: Any) -> list[Any]:
            logprobs = [{0: SimpleNamespace(logprob=-0.1)}]
            return [SimpleNamespace(outputs=[SimpleNamespace(logprobs=logprobs)])] * len(requests)

    folder = tmp_path / "replaced"
    arguments = ("replacement", *on_small, "--format", "vllm-neuron", "--quiet")
    run(*arguments, "--output-dir", folder)
    with pytest.raises(TargetError, match=r"lack 511 tokens of the vocabulary.*max_logprobs=-1"):
        run_replaced(Engine(), folder, point=2)
