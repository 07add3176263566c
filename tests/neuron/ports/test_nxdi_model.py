"""`--target nxdi:…` of `mm2-test model`: applications of NxDI, run on a stand-in of NxD and NxDI.

Tests against the packages themselves are skipped where these cannot be imported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minimax_tools.errors import TargetError
from minimax_tools.model.inputs import pad_rows
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.ports.cpu_mode import ModelClasses
from neuron.ports.nxdi_model import NxdiModelTarget, captured_modules
from neuron.ports.target import ModelBatch

TESTS = Path(__file__).parents[2]
PORT = TESTS / "ports" / "nxdi_stand_in_port.py"
STAND_IN = {"PYTHONPATH": f"{TESTS / 'stand_ins' / 'nxdi'}:{TESTS.parent}", "NXD_CPU_MODE": "1"}

ON_NEURON = """
import os
from pathlib import Path
import torch
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import TargetError
from minimax_tools.model.spec import ModelSpec
from neuron.devices.ranks import Ranks
from neuron.devices.weights import WeightLoader
from neuron.model_runs.passes import plan_passes
from neuron.ports.target import ModelBatch
from neuron.ports.targets import find_model_target

inputs = Capture.open(Path(golden)).read_inputs()
spec = ModelSpec.from_folder(Path(model))
passes = plan_passes(inputs, 2)

def run(name, device, ranks=None):
    target = find_model_target(f"nxdi:{port}:{name}")
    batch = ModelBatch.of(inputs, num_decoded=2, max_new_tokens=1)
    module = target.build(spec, dtype=torch.bfloat16, batch=batch, ranks=ranks)
    loader = WeightLoader(torch.device(device), wait=lambda: None, pool=ReadingPool(1))
    with CheckpointReader(Path(model)) as reader:
        target.load(module, reader, spec, dtype=torch.bfloat16, loader=loader, ranks=ranks)
    with torch.no_grad():
        return module, [module(p.input_ids, p.attention_mask, p.position_ids) for p in passes]

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
_, on_cpu = run("Captured", "cpu")
try:
    run("Application", "cpu", Ranks(rank=0, degree=2))
except TargetError as error:
    print(error)
os.environ["NXD_CPU_MODE"] = "0"
for ranks, device in ((None, "cpu"), (Ranks(rank=0, degree=2), "xla")):
    try:
        run("Application", device, ranks)
    except TargetError as error:
        print(error)
module, on_neuron = run("Application", "xla")
assert module.read_cache(None) is None
assert module.classes is None
for one, other in zip(on_cpu, on_neuron, strict=True):
    assert torch.equal(one.logits, other.logits)
    assert torch.equal(one.tokens, other.tokens)
    assert set(one.sites) == set(other.sites)
    assert all(torch.equal(one.sites[name], other.sites[name]) for name in one.sites)
print(len(on_neuron[0].sites), *on_neuron[0].sites["layer_3.output"].shape)
"""


RUNS = ("Application", "Captured", "Swapped", "Forgetful", "LastColumn", "Contradicting", "Model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all captures."""
    return tmp_path_factory.mktemp("nxdi")


@pytest.fixture(scope="module")
def runs(on_small: Any, serve: Any, folder: Path) -> dict[str, dict[str, Any]]:
    """The runs of the ports, in one process: exit code, stderr, and the JSON record if any."""
    common = ("model", *on_small, "--backend", "cpu", "--json", "--quiet", "--decode", 2)
    commands = [(*common, "--target", f"nxdi:{PORT}:{name}", "--output-dir", folder / name) for name in RUNS]
    done = dict(zip(RUNS, serve(commands, **STAND_IN), strict=True))
    return {
        name: {**one, "record": json.loads(one["stdout"]) if one["stdout"] else {}}
        for name, one in done.items()
    }


def passes(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name / "passes.json").read_text())
    return found


class TestRightPorts:
    def test_application_passes_whole_and_a_class_that_the_device_changes_warns(
        self, runs: Any, folder: Path
    ) -> None:
        found = runs["Application"]["record"]
        assert (runs["Application"]["exit_code"], found["verdict"]) == (0, "warn")
        assert (found["compared"], found["of"]) == (71, 71)
        (finding,) = found["findings"]
        assert (finding["mistake"], finding["is_warning"]) == ("class_of_the_cpu", True)
        assert finding["reason"] == (
            "the device gets DeviceNorm for norm, where this run had Norm: that class is not judged here"
        )
        seen = passes(folder, "Application")
        assert seen["other_classes"] == {"norm": ["Norm", "DeviceNorm"]}
        assert (seen["logits"], seen["cache_form"]) == ("last", "by position")
        assert (seen["cached_layers"], seen["layer_calls"]) == ([0, 1, 2, 3], [[0, 1, 2, 3]] * 3)
        # Each prompt's tokens, chosen by the application after each pass.
        assert len(seen["choices"]) == 2 * 3

    def test_tensor_capture_gives_the_capture_that_hooks_give(self, runs: Any, folder: Path) -> None:
        assert (runs["Captured"]["exit_code"], runs["Captured"]["record"]["verdict"]) == (0, "warn")
        # NxDI keeps the first tensor of several, and rotated queries and keys have no usual name.
        missing = {"router_experts", "router_weights", "q_rope", "k_rope"}
        for file in ("layer_0", "layer_3", "model"):
            hooked, captured = (
                load_file(folder / name / f"{file}.safetensors") for name in ("Application", "Captured")
            )
            assert set(hooked) - set(captured) == (missing if file != "model" else set())
            assert all(torch.equal(hooked[site], captured[site]) for site in captured)
        # As on a device, calls of layers cannot be seen.
        assert passes(folder, "Captured")["layer_calls"] == [[]] * 3


@pytest.mark.parametrize(
    ("name", "number", "layer", "site"),
    [
        ("Swapped", 0, 2, "moe_delta"),
        # At the first step.
        ("Forgetful", 1, 0, "attn_context"),
        ("LastColumn", 0, None, "logits"),
    ],
)
def test_mistake_is_placed(runs: Any, name: str, number: int, layer: int | None, site: str) -> None:
    assert runs[name]["exit_code"] == 1
    first = runs[name]["record"]["findings"][0]
    assert (first["number"], first["layer"], first["sites"]) == (number, layer, [site])


def test_wrong_layer_runs_alone_in_its_bucket_and_is_named(runs: Any) -> None:
    found = runs["Swapped"]["record"]
    assert found["findings"][0]["mistake"] == "gate_up_swapped"
    assert found["isolated"]["blame"][0]["layer"] == 2


def test_application_without_a_sampler_chooses_no_token(runs: Any, folder: Path) -> None:
    assert passes(folder, "LastColumn")["choices"] == []


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "texts"),
        [
            # All options that contradict the run.
            (
                "Contradicting",
                (
                    "batch_size 7 for 2 prompts; seq_len 8 for 27 tokens; padding_side 'left'",
                    "is_continuous_batching",
                    "Correct mm2_neuron_config",
                ),
            ),
            (
                "Model",
                ("expected a subclass of NeuronBaseForCausalLM, found Model", "mm2-test sweep"),
            ),
        ],
    )
    def test_class_that_cannot_run_is_refused(self, runs: Any, name: str, texts: tuple[str, ...]) -> None:
        assert runs[name]["exit_code"] == 3
        assert [text for text in texts if text not in runs[name]["stderr"]] == []

    @pytest.mark.parametrize(
        ("num_decoded", "first", "message"),
        [
            (1, 0, "at least 2 tokens of each prompt in the prefill, found 1"),
            (0, 90, "found positions from 90 on"),
        ],
    )
    def test_prompts_that_nxdi_computes_wrongly(self, num_decoded: int, first: int, message: str) -> None:
        inputs = pad_rows(
            [[5, 6, 7], [1, 2]], padding_side="right", buckets=(3,), pad_token_id=0, source="a test"
        )
        inputs.position_ids.add_(first)
        target = NxdiModelTarget(name="nxdi:port.py:Port", factory=object, source_digest="")
        batch = ModelBatch.of(inputs, num_decoded=num_decoded, max_new_tokens=1)
        with pytest.raises(TargetError, match=message):
            target.build(SyntheticModel().spec(), dtype=torch.bfloat16, batch=batch)


def test_compiled_application_gives_what_the_cpu_gives(
    forked_python: Any, small_fp8: Path, small_golden: Path
) -> None:
    places = f"port, model, golden = {str(PORT)!r}, {str(small_fp8)!r}, {str(small_golden)!r}\n"
    done = forked_python(places + ON_NEURON, **STAND_IN)
    assert done.returncode == 0, done.stderr
    *_, bfloat16, cpu, ranks, sites = done.stdout.splitlines()  # behind gloo's greetings
    assert "Add --dtype float32, or leave out --tp-degree" in bfloat16
    assert "expected NXD_CPU_MODE=1, found NXD_CPU_MODE=0" in cpu
    assert "Leave out --tp-degree, and set tp_degree in mm2_neuron_config" in ranks
    # 14 sites of each of 4 layers, embedding and final norm; [B,S,H] without the bucket's padding.
    assert sites == f"{4 * 14 + 2} 2 22 64"


def test_captured_modules_are_those_with_sites_in_all_layers() -> None:
    in_layer = ["", ".self_attn", ".self_attn.o_proj"]
    without_sites = ["layers", "layers.0.self_attn.rotary_emb", "layers.1", "lm_head", "sampler"]
    present = ["embed_tokens", *(f"layers.0{name}" for name in in_layer), "norm", *without_sites]
    of_layers = [f"layers.{layer}{name}" for name in in_layer for layer in range(2)]
    assert captured_modules(present, num_layers=2) == ["embed_tokens", *of_layers, "norm"]


def test_classes_are_those_of_the_first_layer_and_around_the_layers() -> None:
    def model(norm: type[torch.nn.Module]) -> torch.nn.Module:
        layers = [torch.nn.ModuleDict({"norm": norm()}) for _ in range(2)]
        return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers), "head": torch.nn.Identity()})

    same = ModelClasses.compare(model(torch.nn.ReLU), model(torch.nn.ReLU))
    assert same.other == {}
    assert set(same.here) == {"layers", "layers.0", "layers.0.norm", "head"}
    other = ModelClasses.compare(model(torch.nn.ReLU), model(torch.nn.SiLU))
    assert other.other == {"layers.0.norm": ("ReLU", "SiLU")}
    assert ModelClasses.compare(model(torch.nn.ReLU), None).other is None


def test_application_on_nxdis_own_modules_passes(
    needs_nxdi: None, process: Any, copies: dict[torch.dtype, Path], float32_golden: Path
) -> None:
    # NxDI casts the router to BF16 in a run in BF16.
    sides = ("--model", copies[torch.float32], "--golden", float32_golden, "--dtype", "float32")
    target = ("--target", f"nxdi:{TESTS}/ports/nxdi_whole_port.py:Application", "--backend", "cpu")
    done = process("model", *sides, *target, "--decode", 2, "--json", "--quiet", NXD_CPU_MODE="1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "pass"
