"""The stream of applications on NxDI, replaced: by mm2 itself, compiled, and by a porter's own script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from minimax_tools.errors import TargetError
from neuron.ports.nxdi_stream import add_stream_points, list_points

TESTS = Path(__file__).parents[2]
STAND_IN = {"PYTHONPATH": f"{TESTS / 'stand_ins' / 'nxdi'}:{TESTS.parent}", "NXD_CPU_MODE": "1"}

PORT = TESTS / "ports" / "nxdi_stand_in_port.py"

# A porter's own script: an application is compiled once, and runs with the stream replaced at one point after another.
BY_HAND = """
import os, sys
from pathlib import Path
import torch
from neuronx_distributed_inference.models.config import NeuronConfig
from minimax_tools.errors import Mm2Error
from minimax_tools.model.spec import ModelSpec
from neuron.ports.nxdi_stream import stream_replacement
from neuron.ports.target import target_config
from neuron.replacement.nxdi_run import run_replaced
sys.path.insert(0, os.path.dirname(port))
from nxdi_stand_in_port import ByHand

os.environ["NXD_CPU_MODE"] = "0"
options = dict(batch_size=2, max_context_length=128, seq_len=128, enable_bucketing=False, padding_side="right")
neuron_config = NeuronConfig(**{**options, **other}, torch_dtype=torch.bfloat16, output_logits=True)
neuron_config.tensor_replacement_config = stream_replacement(neuron_config, num_layers=4, hidden_size=64)
values = vars(target_config(ModelSpec.from_folder(Path(model)), ranks=None))
values.pop("ranks", None)
config = ByHand.get_config_cls()(neuron_config, **{**values, "_name_or_path": model, "pad_token_id": 0})
application = ByHand(model, config)
application.compile("nowhere")
application.load("nowhere")
for point in points:
    try:
        print(run_replaced(application, folder, point=point).name)
    except Mm2Error as error:
        print(error)
"""

COMPILED = """
import os
from pathlib import Path
import torch
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from dataclasses import replace
from neuron.devices.weights import WeightLoader
from neuron.model_runs.passes import plan_passes
from neuron.ports.target import ModelBatch
from neuron.ports.targets import find_model_target

capture = Capture.open(Path(golden))
inputs, spec = capture.read_inputs(), ModelSpec.from_folder(Path(model))
passes = plan_passes(inputs, 2)
stream = capture.read(3, Site.INPUT)

def run(device, point):
    target = find_model_target(f"nxdi:{port}:Application")
    batch = replace(ModelBatch.of(inputs, num_decoded=2, max_new_tokens=0), replaces_stream=True)
    module = target.build(spec, dtype=torch.bfloat16, batch=batch)
    loader = WeightLoader(torch.device(device), wait=lambda: None, pool=ReadingPool(1))
    with CheckpointReader(Path(model)) as reader:
        target.load(module, reader, spec, dtype=torch.bfloat16, loader=loader)
    logits = []
    for one in passes:
        if point is not None:
            module.replace_stream(point, one.cut(stream))
        with torch.no_grad():
            logits.append(module(one.input_ids, one.attention_mask, one.position_ids).logits)
        module.replace_stream(None, None)
    return torch.stack(logits)

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
on_cpu, own = run("cpu", 3), run("cpu", None)
os.environ["NXD_CPU_MODE"] = "0"
assert torch.equal(run("xla", 3), on_cpu)
assert torch.equal(run("xla", None), own)
assert not torch.equal(on_cpu, own)
print("same")
"""


def test_mm2_replaces_the_stream_of_applications(on_small: Any, serve: Any, tmp_path: Path) -> None:
    common = ("bisect", "--whole", *on_small, "--backend", "cpu", "--json", "--quiet")
    names = ("Application", "Swapped", "Divided")
    commands = [
        (*common, "--target", f"nxdi:{PORT}:{name}", "--output-dir", tmp_path / name) for name in names
    ]
    right, swapped, divided = serve(commands, **STAND_IN)
    assert right["exit_code"] == 0, right["stderr"]
    assert json.loads(right["stdout"])["verdict"] == "pass"
    assert swapped["exit_code"] == 1, swapped["stderr"]
    assert [blame["layer"] for blame in json.loads(swapped["stdout"])["blame"]] == [2]
    assert divided["exit_code"] == 3
    assert "divides its stream among the ranks: found sequence_parallel_enabled" in divided["stderr"]


def test_compiled_graph_takes_the_stream_that_the_cpu_takes(
    forked_python: Any, small_fp8: Path, small_golden: Path
) -> None:
    places = f"port, model, golden = {str(PORT)!r}, {str(small_fp8)!r}, {str(small_golden)!r}\n"
    done = forked_python(places + COMPILED, **STAND_IN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "same"


class TestByHand:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """The folder of the runs."""
        return tmp_path / "replaced"

    @pytest.fixture
    def search(self, run: Any, on_small: Any, folder: Path) -> Any:
        """Asks for the next run: the exit code and the record."""

        def ask() -> tuple[int, dict[str, Any]]:
            result = run(
                *("replacement", *on_small, "--format", "nxdi", "--json", "--quiet", "--output-dir", folder)
            )
            return result.exit_code, json.loads(result.stdout)

        return ask

    @pytest.fixture
    def by_hand(self, forked_python: Any, small_fp8: Path, folder: Path) -> Any:
        """Makes the run of a point with other options: what the script prints."""

        def make(point: int, **other: Any) -> str:
            places = {"port": str(PORT), "model": str(small_fp8), "folder": str(folder)}
            values = {**places, "points": [point], "other": other}
            code = "\n".join(f"{name} = {value!r}" for name, value in values.items()) + BY_HAND
            done = forked_python(code, **STAND_IN)
            assert done.returncode == 0, done.stderr
            return str(done.stdout)

        return make

    def test_runs_asked_for_name_the_wrong_layer(self, search: Any, by_hand: Any) -> None:
        points = []
        exit_code, record = search()
        while not record["is_finished"]:
            assert (exit_code, record["verdict"]) == (3, "incomparable")
            points.append(record["waits_for"]["point"])
            assert f"point={points[-1]})" in "\n".join(record["lines"])
            by_hand(points[-1])
            exit_code, record = search()
        assert points == [2, 4, 3]
        assert (exit_code, [blame["layer"] for blame in record["blame"]]) == (1, [2])
        assert [command.split()[-1] for command in record["next"]] == ["--anew"]

    def test_application_of_other_sizes_is_refused(self, search: Any, by_hand: Any) -> None:
        search()
        printed = by_hand(2, max_context_length=64, enable_bucketing=True)
        assert "expected max_context_length=128, enable_bucketing=False" in printed
        assert "found max_context_length=64, enable_bucketing=True" in printed


class TestPoints:
    class Layer(nn.Module):
        def forward(
            self, hidden_states: torch.Tensor, residual: object = None
        ) -> tuple[torch.Tensor, object]:
            return hidden_states + 1, residual

    def model(self) -> nn.Module:
        model = nn.Module()
        model.layers = nn.ModuleList([self.Layer(), self.Layer()])
        model.norm = nn.LayerNorm(4)
        return model

    @pytest.mark.parametrize("by_name", [False, True])
    def test_point_returns_what_the_layer_is_given(self, by_name: bool) -> None:
        model, states = self.model(), torch.zeros(1, 2, 4)
        names = set(model.state_dict())
        add_stream_points(model)
        assert set(model.state_dict()) == names
        assert set(list_points(2)) < {name for name, _ in model.named_modules()}
        layer = model.layers[1]
        layer.stream.register_forward_hook(lambda *_: torch.full_like(states, 5.0))
        output, _ = layer(hidden_states=states) if by_name else layer(states)
        assert output.unique().tolist() == [6.0]

    def test_point_takes_the_stream_among_other_tensors(self) -> None:
        class Masked(nn.Module):
            def forward(self, attention_mask: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
                return hidden_states * attention_mask

        model = self.model()
        model.layers.append(Masked())
        add_stream_points(model)
        layer, ones = model.layers[2], torch.ones(1, 2, 4)
        layer.stream.register_forward_hook(lambda *_: ones * 5.0)
        assert layer(attention_mask=ones, hidden_states=ones * 3.0).unique().tolist() == [5.0]

    def test_model_without_layers_is_refused(self) -> None:
        with pytest.raises(TargetError, match="has no stream to replace"):
            add_stream_points(nn.Linear(2, 2))

    def test_stream_in_two_summands_is_refused(self) -> None:
        model = self.model()
        add_stream_points(model)
        with pytest.raises(TargetError, match="qkv_kernel_fuse_residual_add"):
            model.layers[0](torch.zeros(1, 2, 4), residual=torch.zeros(1, 2, 4))
