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
    """Runs a model of the test's file, or of a source that extends it: the result, and its JSON."""

    def run_model(name: str, source: str = "") -> tuple[Any, dict[str, Any]]:
        file = PORT
        if source:
            file = tmp_path / "extended_port.py"
            file.write_text(IMPORTS + source)
        arguments = ("model", *on_small, "--backend", "cpu", "--decode", 2, "--json", "--quiet")
        target = ("--target", f"vllm-neuron:{file}:{name}", "--output-dir", tmp_path / "run")
        result = run(*arguments, *target)
        return result, json.loads(result.stdout) if result.stdout else {}

    return run_model


@pytest.fixture
def run_ranks(forked_ranks: Any, on_small: Any) -> Any:
    """Runs one of the test's models on two ranks of the CPU: the process, and its JSON."""

    def run_model(name: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        given = ("model", *on_small, "--backend", "cpu", "--decode", 2, "--json")
        done: subprocess.CompletedProcess[str] = forked_ranks(
            *given,
            "--target",
            f"vllm-neuron:{PORT}:{name}",
            PYTHONPATH=f"{Path(__file__).parents[3]}:{STAND_IN}",
            VLLM_NEURON_CPU_MODE="1",
        )
        return done, json.loads(done.stdout) if done.stdout else {}

    return run_model


@pytest.mark.parametrize("name", ["MiniMaxM2ForCausalLM", "Summands"])
def test_right_models_pass_and_their_cache_is_read(run_port: Any, tmp_path: Path, name: str) -> None:
    result, record = run_port(name)
    assert (result.exit_code, record["verdict"]) == (0, "pass"), result.stderr
    assert (record["compared"], record["of"]) == (39, 71)
    assert "findings" not in record
    passes = json.loads((tmp_path / "run" / "passes.json").read_text())
    assert (passes["cached_layers"], passes["cache_form"]) == ([0, 1, 2, 3], "by position")
    assert passes["layer_calls"] == [[0, 1, 2, 3]] * 3


def test_tokens_that_a_model_samples_on_the_device_are_its_choices(run_port: Any, tmp_path: Path) -> None:
    result, record = run_port("Sampling")
    assert (result.exit_code, record["verdict"]) == (0, "pass"), result.stderr
    choices = json.loads((tmp_path / "run" / "passes.json").read_text())["choices"]
    assert len(choices) == 6
    assert all(choice["chosen"] == choice["likeliest"] for choice in choices)


# Keys that are written to another slot.
LATE = """
class Late(MiniMaxM2ForCausalLM):
    def forward(self, input_ids, positions, attn_metadata=None, **given):
        name = "layers.3.self_attn"
        slots = attn_metadata[name]["slot_mapping"]
        attn_metadata[name] = {**attn_metadata[name], "slot_mapping": slots + (slots > 0)}
        return super().forward(input_ids, positions, attn_metadata=attn_metadata, **given)
"""


@pytest.mark.parametrize(
    ("name", "source", "place", "found"),
    [
        ("Swapped", "", (0, 2), "gate_up_swapped"),
        ("SwappedSummands", "", (0, 2), "gate_up_swapped"),
        ("ShortSighted", "", (1, 1), "attn_delta"),
        ("Late", LATE, (0, 3), ""),
    ],
)
def test_mistake_is_placed(run_port: Any, name: str, source: str, place: tuple[int, int], found: str) -> None:
    result, record = run_port(name, source)
    assert (result.exit_code, record["verdict"]) == (1, "fail"), result.stderr
    assert_placed(record, place, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place", "found"),
    [("Swapped", (0, 2), "gate_up_swapped"), ("NormPerRank", (0, 1), "attn_delta")],
)
def test_mistake_is_placed_on_two_ranks_too(
    run_ranks: Any, name: str, place: tuple[int, int], found: str
) -> None:
    done, record = run_ranks(name)
    assert (done.returncode, record["verdict"]) == (1, "fail"), done.stderr
    assert_placed(record, place, found)


def assert_placed(record: dict[str, Any], place: tuple[int, int], found: str) -> None:
    """Check the first finding's pass and layer, and that it has a mistake or one of its sites, if any is given."""
    first = record["findings"][0]
    assert (first["number"], first["layer"]) == place
    assert found in ("", first["mistake"], *first["sites"])


def test_a_right_model_passes_on_two_ranks_that_divide_the_tokens(run_ranks: Any) -> None:
    done, record = run_ranks("MiniMaxM2ForCausalLM")
    assert (done.returncode, record["verdict"]) == (0, "pass"), done.stderr
    # Queries and keys are divided by heads, and the port does not say how: they are not compared.
    assert (record["compared"], record["of"]) == (31, 71)


# A model that takes the checkpoint as it is.
TAKES_FP8 = """
class TakesFp8(MiniMaxM2ForCausalLM):
    takes_fp8 = True

    def load_weights(self, checkpoint_path, device, cache_dir):
        raise RuntimeError(f"loaded from {checkpoint_path}")
"""


@pytest.mark.parametrize(
    ("name", "source", "texts"),
    [
        ("Unloaded", "", ("left weights without values: found model.norm.weight",)),
        ("Norm", "", ("is no model for vLLM Neuron", "from_configs(hf_config, neuron_config)")),
        ("TakesFp8", TAKES_FP8, ("loaded from {model}",)),
    ],
)
def test_model_that_cannot_be_run_is_refused(
    run_port: Any, small_fp8: Path, name: str, source: str, texts: tuple[str, ...]
) -> None:
    result, _ = run_port(name, source)
    assert result.exit_code == 3
    stderr = " ".join(result.stderr.split())
    assert [text for text in texts if text.format(model=small_fp8) not in stderr] == []


def test_cpu_that_the_plugin_was_not_told_of_is_refused(
    run_port: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_NEURON_CPU_MODE")
    result, _ = run_port("MiniMaxM2ForCausalLM")
    assert result.exit_code == 3
    assert "expected VLLM_NEURON_CPU_MODE=1, found VLLM_NEURON_CPU_MODE=0" in result.stderr


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
