"""`--target vllm-neuron:…`: a whole port for the vLLM Neuron plugin, fed as the plugin's runner feeds it.

The plugin is not on the public index: a stand-in with its names and signatures takes its place (its README says more).
What needs the plugin itself is skipped where it cannot be imported.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

PORTS = Path(__file__).parents[2] / "ports"
PORT, STAND_IN = PORTS / "vllm_neuron_port.py", PORTS / "vllm_neuron_stand_in"
IMPORTS = f"import sys\nsys.path.insert(0, {str(PORTS)!r})\nfrom vllm_neuron_port import *\n"


@pytest.fixture
def run_port(run: Any, tmp_path: Path, on_small: Any, vllm_neuron: Path) -> Any:
    """Runs one of the test's models on the small model: the result, and its JSON."""

    def run_model(name: str, *options: object, file: Path = PORT) -> tuple[Any, dict[str, Any]]:
        arguments = ("model", *on_small, "--backend", "cpu", "--json", "--quiet")
        target = f"vllm-neuron:{file}:{name}"
        result = run(*arguments, "--target", target, "--output-dir", tmp_path / "run", *options)
        return result, json.loads(result.stdout) if result.stdout else {}

    return run_model


@pytest.mark.parametrize("name", ["MiniMaxM2ForCausalLM", "Summands"])
def test_right_models_pass_and_their_cache_is_read(run_port: Any, tmp_path: Path, name: str) -> None:
    result, record = run_port(name)
    assert (result.exit_code, record["verdict"]) == (0, "pass"), result.stderr
    assert (record["compared"], record["of"]) == (39, 71)
    assert "findings" not in record
    passes = json.loads((tmp_path / "run" / "passes.json").read_text())
    assert (passes["cached_layers"], passes["cache_form"]) == ([0, 1, 2, 3], "by position")
    assert passes["layer_calls"] == [[0, 1, 2, 3]] * 5


def test_tokens_that_a_model_samples_on_the_device_are_its_choices(run_port: Any, tmp_path: Path) -> None:
    result, record = run_port("Sampling")
    assert (result.exit_code, record["verdict"]) == (0, "pass"), result.stderr
    choices = json.loads((tmp_path / "run" / "passes.json").read_text())["choices"]
    assert len(choices) == 10
    assert all(choice["chosen"] == choice["likeliest"] for choice in choices)


@pytest.mark.parametrize("name", ["Swapped", "SwappedSummands"])
def test_a_mistake_in_the_weights_is_placed_and_named(run_port: Any, name: str) -> None:
    result, record = run_port(name)
    assert (result.exit_code, record["verdict"]) == (1, "fail"), result.stderr
    first = record["findings"][0]
    assert (first["number"], first["layer"], first["mistake"]) == (0, 2, "gate_up_swapped")


def test_a_mistake_in_decoding_is_placed(run_port: Any) -> None:
    result, record = run_port("ShortSighted")
    assert (result.exit_code, record["verdict"]) == (1, "fail"), result.stderr
    first = record["findings"][0]
    assert (first["number"], first["layer"]) == (1, 1)
    assert "attn_delta" in first["sites"]


def test_keys_written_to_another_slot_are_found(run_port: Any, tmp_path: Path) -> None:
    file = tmp_path / "late_port.py"
    file.write_text(
        IMPORTS + "class Model(MiniMaxM2ForCausalLM):\n"
        "    def forward(self, input_ids, positions, attn_metadata=None, **given):\n"
        "        name = 'layers.3.self_attn'\n"
        "        slots = attn_metadata[name]['slot_mapping']\n"
        "        attn_metadata[name] = {**attn_metadata[name], 'slot_mapping': slots + (slots > 0)}\n"
        "        return super().forward(input_ids, positions, attn_metadata=attn_metadata, **given)\n"
    )
    result, record = run_port("Model", file=file)
    assert (result.exit_code, record["verdict"]) == (1, "fail"), result.stderr
    assert record["findings"][0]["layer"] == 3


def test_weights_that_the_model_did_not_load_are_named(run_port: Any) -> None:
    result, _ = run_port("Unloaded")
    assert result.exit_code == 3
    assert "left weights without values: found model.norm.weight" in result.stderr


def test_a_model_that_takes_fp8_gets_the_checkpoint_as_it_is(
    run_port: Any, tmp_path: Path, small_fp8: Path
) -> None:
    file = tmp_path / "fp8_port.py"
    file.write_text(
        IMPORTS + "class Model(MiniMaxM2ForCausalLM):\n"
        "    takes_fp8 = True\n"
        "    def load_weights(self, checkpoint_path, device, cache_dir):\n"
        "        raise RuntimeError(f'loaded from {checkpoint_path}')\n"
    )
    result, _ = run_port("Model", file=file)
    assert result.exit_code == 3
    assert f"loaded from {small_fp8}" in " ".join(result.stderr.split())


@pytest.fixture
def run_ranks(forked_ranks: Any, on_small: Any) -> Any:
    """Runs one of the test's models on two ranks of the CPU: the process, and its JSON."""

    def run_model(name: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        given = ("model", *on_small, "--backend", "cpu", "--json")
        done: subprocess.CompletedProcess[str] = forked_ranks(
            *given,
            "--target",
            f"vllm-neuron:{PORT}:{name}",
            PYTHONPATH=f"{Path(__file__).parents[3]}:{STAND_IN}",
            VLLM_NEURON_CPU_MODE="1",
        )
        return done, json.loads(done.stdout) if done.stdout else {}

    return run_model


def test_a_right_model_passes_on_two_ranks_that_divide_the_tokens(run_ranks: Any) -> None:
    done, record = run_ranks("MiniMaxM2ForCausalLM")
    assert (done.returncode, record["verdict"]) == (0, "pass"), done.stderr
    # Queries and keys are divided by heads, and the port does not say how: they are not compared.
    assert (record["compared"], record["of"]) == (31, 71)


@pytest.mark.slow
def test_a_mistake_is_named_on_two_ranks_too(run_ranks: Any) -> None:
    done, record = run_ranks("Swapped")
    assert (done.returncode, record["verdict"]) == (1, "fail"), done.stderr
    first = record["findings"][0]
    assert (first["number"], first["layer"], first["mistake"]) == (0, 2, "gate_up_swapped")


@pytest.mark.slow
def test_a_norm_for_each_rank_is_placed(run_ranks: Any) -> None:
    done, record = run_ranks("NormPerRank")
    assert (done.returncode, record["verdict"]) == (1, "fail"), done.stderr
    first = record["findings"][0]
    assert (first["number"], first["layer"]) == (0, 1)
    assert "attn_delta" in first["sites"]


def test_cpu_that_the_plugin_was_not_told_of_is_refused(
    run_port: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_NEURON_CPU_MODE")
    result, _ = run_port("MiniMaxM2ForCausalLM")
    assert result.exit_code == 3
    assert "expected VLLM_NEURON_CPU_MODE=1, found VLLM_NEURON_CPU_MODE=0" in result.stderr


def test_a_class_that_the_runner_cannot_call_is_refused(run_port: Any) -> None:
    result, _ = run_port("Norm")
    assert result.exit_code == 3
    assert "is no model for vLLM Neuron" in result.stderr
    assert "from_configs(hf_config, neuron_config)" in result.stderr


def test_what_names_no_class_is_a_usage_error(on_small: Any, run: Any, vllm_neuron: Path) -> None:
    result = run("model", *on_small, "--target", "vllm-neuron:port")
    assert result.exit_code == 2
    assert "vllm-neuron:PATH.py:NAME or vllm-neuron:package.module:NAME" in " ".join(result.stderr.split())


def test_without_the_plugin_it_says_what_to_install(on_small: Any, forked_python: Any, run: Any) -> None:
    if forked_python("import vllm_neuron.model.neuron_config").returncode == 0:
        pytest.skip("the vLLM Neuron plugin is installed")
    arguments = ("model", *on_small, "--backend", "cpu")
    result = run(*arguments, "--target", "vllm-neuron:some.module:Model")
    assert result.exit_code == 3
    assert "needs the packages vllm and vllm_neuron" in result.stderr
    assert "pip.repos.neuron.amazonaws.com" in result.stderr


def test_the_model_passes_on_the_plugin_itself(on_small: Any, forked_python: Any, process: Any) -> None:
    done = forked_python("import vllm_neuron.nn, vllm_neuron.utils.checkpoints")
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it is not installed"])[-1]
        pytest.skip(f"the vLLM Neuron plugin cannot be imported: {reason}")
    given = ("model", *on_small, "--backend", "cpu", "--json")
    done = process(*given, "--target", f"vllm-neuron:{PORT}:MiniMaxM2ForCausalLM", VLLM_NEURON_CPU_MODE="1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "pass"
