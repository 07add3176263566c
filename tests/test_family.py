"""The family of MiniMax-M2: every published config runs alike, and what mm2 does not do is refused by name.

The refused models are folders with config.json alone, or hub models whose shards nobody asks for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch
from safetensors.torch import load_file

from compare.cli import main as mm2_compare
from compare.diagnosis.cli import main as mm2_diagnose
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.cli import mm2_split
from minimax_tools.errors import CheckpointError
from minimax_tools.model.spec import ModelSpec
from minimax_tools.split.factory import ModelFactory
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.cli import main as mm2_test
from neuron.ports.target import target_config

Command = Callable[..., click.testing.Result]

FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "float8_e4m3fn",
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
AUTO_MAP = {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}
# Keys and values of MiniMaxAI/MiniMax-M2.1's and -M2.5's config.json.
M21: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "auto_map": AUTO_MAP,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": FP8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "transformers_version": "4.46.1",
    "use_cache": True,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
# The first one carries keys of older models along.
M2 = {
    **M21,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.02,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "mlp_intermediate_size": 8192,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "transformers_version": "4.57.1",
}
M27 = {**M21, "max_position_embeddings": 204800, "dtype": "bfloat16"}
MINIMAX_KEYS = {
    *(
        "attn_type_list",
        "auto_map",
        "mtp_transformer_layers",
        "num_mtp_modules",
        "qk_norm_type",
        "rope_theta",
    ),
    *("rotary_dim", "scoring_func", "shared_intermediate_size", "use_mtp", "use_qk_norm", "use_routing_bias"),
}
# As transformers 5 writes any of them: none of MiniMax's own keys.
REWRITTEN = {name: value for name, value in M21.items() if name not in MINIMAX_KEYS} | {
    "dtype": "bfloat16",
    "pad_token_id": None,
    "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 5000000, "rope_type": "default"},
    "transformers_version": "5.23.0",
}
CONFIGS = {
    "M2": M2,
    "M2.1 and M2.5": M21,
    "M2.7": M27,
    "written by transformers": REWRITTEN,
    "written by transformers that did not know rotary_dim": {
        **REWRITTEN,
        "rope_parameters": {"rope_theta": 5000000, "rope_type": "default"},
        "rotary_dim": 64,
    },
}

TOY = SyntheticModel(num_hidden_layers=2)
LENGTHS = "24,9"
SIZES = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_local_experts"),
    *("num_experts_per_tok", "intermediate_size", "vocab_size", "num_hidden_layers"),
)

OTHER_METHODS = ("awq", "gptq", "compressed-tensors", "mxfp4", "bitsandbytes", "modelopt")
YARN = {"type": "yarn", "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 5e6}
# The key that each refused config.json sets, its value, and what the message says of it.
REFUSED: dict[str, tuple[str, Any, str]] = {
    "lightning attention": ("attn_type_list", [0, 1], "sets attn_type_list: expected 1 (softmax attention)"),
    "list of other length": ("attn_type_list", [1] * 62, "for each of 2 layers, found 62 entries"),
    "shared expert": ("shared_intermediate_size", 512, "shared_intermediate_size: expected 0, found 512"),
    "window": ("sliding_window", 4096, "sliding_window: expected 0, found 4096"),
    "yarn": ("rope_scaling", YARN, "type: expected 'default', found 'yarn'. mm2 computes plain RoPE only"),
    "longrope": (
        "rope_parameters",
        LONGROPE,
        "rope_parameters.rope_type: expected 'default', found 'longrope'",
    ),
    "mlx": (
        "quantization",
        {"group_size": 64, "bits": 4},
        "found the format of MLX, bits 4, group_size 64",
    ),
    "other blocks": (
        "quantization_config",
        {**FP8, "weight_block_size": [64, 64]},
        "quantization_config.weight_block_size: expected [128, 128], found [64, 64]",
    ),
    "static": (
        "quantization_config",
        {**FP8, "activation_scheme": "static"},
        "quantization_config.activation_scheme: expected 'dynamic', found 'static'",
    ),
} | {
    method: ("quantization_config", {"quant_method": method, "bits": 4}, f"found quant_method '{method}'")
    for method in OTHER_METHODS
}
PROGRAMS = {
    "mm2-compare": mm2_compare,
    "mm2-diagnose": mm2_diagnose,
    "mm2-gpu": mm2_gpu,
    "mm2-test": mm2_test,
}
COMMANDS = (
    "mm2-gpu extract-all",
    "mm2-gpu full",
    "mm2-gpu single-layer --layer 0",
    "mm2-gpu multi-layer --start-layer 0 --end-layer 1",
    "mm2-gpu extract-all --stream on",
    "mm2-gpu certify --golden GOLDEN",
    "mm2-test sweep --golden GOLDEN",
    "mm2-test single-layer --layer 0",
    "mm2-test multi-layer --start-layer 0 --end-layer 1",
    "mm2-test full",
    "mm2-test component --component moe --layer 0 --golden GOLDEN",
    "mm2-test bisect --golden GOLDEN",
    "mm2-test weights --target builtin",
    "mm2-test trace --layer 0 --output traced.pt",
    "mm2-test check",
    "mm2-compare --golden GOLDEN --run GOLDEN",
    "mm2-diagnose --golden GOLDEN --run GOLDEN",
)


def toy_config(published: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a published config, with the toy's sizes."""
    config = {**published, **{name: getattr(TOY, name) for name in SIZES}}
    if "rotary_dim" in config:
        config["rotary_dim"] = TOY.rotary_dim
    if "attn_type_list" in config:
        config["attn_type_list"] = [1] * TOY.num_hidden_layers
    return config


def refused_config(*names: str) -> dict[str, Any]:
    """Return the first config with the keys of refused ones."""
    return toy_config(M2) | {key: value for key, value, _ in (REFUSED[name] for name in names)}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors(capture: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a capture's layers, by file and name."""
    return {
        f"{path.name}/{name}": tensor
        for path in sorted(capture.glob("layer_*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family") / "toy"
    synthesize(folder, model=TOY, dtype=torch.float8_e4m3fn, shard_size_bytes=None, seed=0)
    return folder


@pytest.fixture(scope="module")
def make_flavour(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a folder with a toy of a published config, its golden and a sweep of mm2's own layers, once."""
    made: dict[str, Path] = {}

    def run(main: Any, *words: object) -> None:
        result = click.testing.CliRunner().invoke(main, [*map(str, words), "--quiet"])
        assert result.exit_code == 0, result.output

    def make(name: str) -> Path:
        if name not in made:
            root = made[name] = tmp_path_factory.mktemp("flavour")
            model, golden = ("--model", root / "model"), root / "golden"
            shutil.copytree(checkpoint, root / "model")
            write_config(root / "model", toy_config(CONFIGS[name]))
            run(mm2_gpu, "extract-all", *model, "--seq-len", LENGTHS, "--output-dir", golden)
            judged = ("--golden", golden, "--backend", "cpu", "--output-dir", root / "run")
            run(mm2_test, "sweep", *model, *judged)
        return made[name]

    return make


@pytest.fixture(scope="module")
def golden(make_flavour: Callable[[str], Path]) -> Path:
    return make_flavour("M2") / "golden"


@pytest.mark.parametrize("name", CONFIGS)
def test_published_config_is_read_and_shown_to_a_port_however_it_is_written(name: str) -> None:
    spec = ModelSpec.from_config(CONFIGS[name])
    positions = 204800 if name == "M2.7" else 196608
    expected = {**SyntheticModel.m2().spec().quantities(), "max_position_embeddings": positions}
    assert (spec.quantities(), spec.is_fp8, spec.rope_theta) == (expected, True, 5e6)
    config = target_config(spec)
    assert (config.rotary_dim, config.partial_rotary_factor, config.rope_theta) == (64, 0.5, 5e6)
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
    assert config.attn_type_list == [1] * 62
    assert (config.shared_intermediate_size, config.qk_norm_type) == (0, "per_layer")
    assert (config.scoring_func, config.use_qk_norm, config.use_routing_bias) == ("sigmoid", True, True)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "M2"])
def test_golden_and_device_layer_are_equal_however_the_config_is_written(
    make_flavour: Callable[[str], Path], name: str
) -> None:
    for capture in ("golden", "run"):
        first, other = (tensors(make_flavour(flavour) / capture) for flavour in ("M2", name))
        assert first
        assert first.keys() == other.keys()
        assert [key for key in first if not torch.equal(first[key], other[key])] == []


def test_another_width_would_be_seen(
    make_flavour: Callable[[str], Path], command: Command, tmp_path: Path
) -> None:
    flavour = make_flavour("written by transformers")
    config = json.loads((flavour / "model" / "config.json").read_text())
    config["rope_parameters"]["partial_rotary_factor"] = 0.25
    model = write_config(Path(shutil.copytree(flavour / "model", tmp_path / "model")), config)
    arguments = ("--seq-len", LENGTHS, "--quiet", "--output-dir", tmp_path / "golden")
    assert command(mm2_gpu, "single-layer", "--layer", 0, "--model", model, *arguments).exit_code == 0
    right, other = (
        tensors(folder)["layer_0.safetensors/attn_delta"]
        for folder in (flavour / "golden", tmp_path / "golden")
    )
    assert not torch.equal(right, other)


@pytest.mark.parametrize("refused", REFUSED)
@pytest.mark.parametrize("line", ["mm2-gpu extract-all", "mm2-test sweep --golden GOLDEN"])
def test_what_mm2_does_not_do_is_named_from_config_alone(
    command: Command, golden: Path, tmp_path: Path, line: str, refused: str
) -> None:
    key, _, said = REFUSED[refused]
    model = write_config(tmp_path / "model", refused_config(refused))
    result = run_command(command, line, model, golden)
    assert result.exit_code == 3
    assert f"{model}/config.json sets {key}" in result.stderr
    assert said in result.stderr
    assert "nstall" not in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_refuses_before_anything_is_loaded(
    command: Command, golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_command(command, line, write_config(tmp_path / "model", refused_config("awq")), golden)
    assert result.exit_code == 3, result.output
    assert REFUSED["awq"][2] in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_all_refused_keys_are_named_at_once(command: Command, golden: Path, tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", refused_config("yarn", "shared expert", "awq"))
    result = run_command(command, "mm2-gpu extract-all", model, golden)
    for part in ("shared_intermediate_size is 512 instead of 0", "rope_scaling.type is 'yarn'", "'awq'"):
        assert part in result.stderr


def run_command(command: Command, line: str, model: Path, golden: Path) -> click.testing.Result:
    program, *arguments = line.split()
    filled = [golden if argument == "GOLDEN" else argument for argument in arguments]
    return command(PROGRAMS[program], *filled, "--model", model)


# A golden, a diagnosis and the weights of a comparison, each of a model of its own: exit code and error of each.
ASK_THE_HUB = """
import json, sys
from pathlib import Path
from click.testing import CliRunner
from compare.diagnosis.cli import main as diagnose
from compare.sides.golden_weights import CheckpointWeights
from gpu_reference.cli import main as capture
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import Mm2Error

told = []
for main, words in ((capture, ["extract-all", "--model", "owner/golden"]), (diagnose, ["--model", "owner/diagnosis"])):
    result = CliRunner().invoke(main, words)
    told.append((result.exit_code, result.stderr))
try:
    with CheckpointWeights(model="owner/weights").open_layer(0, Capture.open(Path(sys.argv[1]))):
        told.append((0, ""))
except Mm2Error as error:
    told.append((error.exit_code, str(error)))
print(json.dumps(told))
"""


@pytest.mark.slow
def test_no_shard_of_a_refused_hub_model_is_fetched(
    hub: Any, checkpoint: Path, golden: Path, tmp_path: Path, forked_python: Any
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "awq"))
    write_config(folder, refused_config("awq"))
    names = ("golden", "diagnosis", "weights")
    for name in names:
        hub.add(f"owner/{name}", folder)
    # huggingface_hub reads its variables when it is imported.
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
    done = forked_python(ASK_THE_HUB, golden, **environment)
    assert done.returncode == 0, done.stderr
    for name, (exit_code, error) in zip(names, json.loads(done.stdout), strict=True):
        assert exit_code != 0, name
        assert "quant_method 'awq'" in error, name
        assert any(name in request.path and request.file == "config.json" for request in hub.asked("GET")), (
            name
        )
    assert not hub.asked("GET", ".safetensors")


class TestSplitting:
    """Bytes are bytes: a model that mm2 does not compute can still be divided, fetched and cut."""

    NODES = ("--node", "a:memory=60MB,tflops=2", "--node", "b:memory=60MB,tflops=1", "--context-length", "64")

    @pytest.mark.parametrize("refused", ["awq", "mlx", "yarn", "lightning attention"])
    def test_model_with_headers_is_planned_and_cut(
        self, command: Command, checkpoint: Path, tmp_path: Path, refused: str
    ) -> None:
        folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
        write_config(folder, refused_config(refused))
        plan = tmp_path / "plan.json"
        planned = command(mm2_split, "plan", "--model", folder, *self.NODES, "--output", plan)
        assert planned.exit_code == 0, planned.output
        cut = command(mm2_split, "extract", "--plan", plan, "--node", "a", "--output", tmp_path / "a")
        assert cut.exit_code == 0, cut.output

    def test_config_alone_does_not_tell_the_tensors_of_another_format(
        self, command: Command, tmp_path: Path
    ) -> None:
        folder = write_config(tmp_path / "model", refused_config("gptq"))
        result = command(mm2_split, "plan", "--model", folder, *self.NODES)
        assert result.exit_code == 3
        assert "the config.json of a minimax_m2 in another format" in result.stderr
        assert "Fetch what is missing, or give --model a hub id" in result.stderr

    @pytest.mark.parametrize("refused", ["awq", "mlx", "lightning attention", "shared expert"])
    def test_parts_that_need_the_graph_are_refused(
        self, checkpoint: Path, tmp_path: Path, refused: str
    ) -> None:
        folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
        write_config(folder, refused_config(refused))
        for shard in folder.glob("*.safetensors"):
            shard.unlink()
        with pytest.raises(CheckpointError, match=f"config.json sets {REFUSED[refused][0]}"):
            ModelFactory.create_split_models("minimax_m2", str(folder), 1, 2)
