from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import mm2
from compare.cli import main as mm2_compare
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CheckpointError
from neuron.cli import main as mm2_test

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
OLD = Path(__file__).parents[1] / "old_files"
Run = Callable[..., mm2.Recording]
Example = Callable[[str], Any]


@pytest.mark.parametrize("file", ["minimal_port.py", "port.py"])
def test_right_port_passes(file: str, run: Run, example: Example, layer: mm2.GoldenLayer) -> None:
    comparison = mm2.compare(layer, run(example(file)))
    assert comparison
    assert comparison.require() is comparison
    assert (comparison.verdict, comparison.of) == ("pass", 17)
    assert comparison.compared == {"minimal_port.py": 13, "port.py": 17}[file]
    assert comparison.site("moe_delta").noise.whole < 1.2  # type: ignore[union-attr]


def test_wrong_port_fails_with_the_report(run: Run, swapped: Any, layer: mm2.GoldenLayer) -> None:
    comparison = mm2.compare(layer, run(swapped))
    assert not comparison
    assert comparison.verdict == "fail"
    assert comparison.blame[0].sites[-1] == "moe_delta"
    assert "moe_delta" in repr(comparison)
    with pytest.raises(mm2.PortDiffersError, match=r"FAIL: layer 1, .*moe_delta\n[\s\S]*noise floor, limit"):
        comparison.require()


@pytest.fixture(scope="module")
def swept(golden: Path, toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of all layers of the minimal port."""
    folder = tmp_path_factory.mktemp("swept") / "run"
    target = f"{EXAMPLES / 'minimal_port.py'}:DecoderLayer"
    words = ("--model", toy, "--golden", golden, "--backend", "cpu", "--target", target)
    done = CliRunner().invoke(mm2_test, ["sweep", *map(str, words), "--output-dir", str(folder), "--quiet"])
    assert done.exit_code == 0, done.output
    return folder


def test_results_and_limits_are_those_of_a_sweep_of_all_layers(
    run: Run, example: Example, layer: mm2.GoldenLayer, golden: Path, toy: Path, swept: Path, command: Any
) -> None:
    sides = ("--golden", golden, "--run", swept, "--model", toy)
    printed = json.loads(command(mm2_compare, *sides, "--json", "--quiet").stdout)
    recording = run(example("minimal_port.py"))
    record = mm2.compare(layer, recording).to_json()
    of_layer_1 = [site for site in printed["sites"] if site["layer"] == 1]
    assert record["sites"] == of_layer_1
    assert record["verdict"] == printed["verdict"]
    # Limits are wider than those of a comparison of one layer, which fails less often than a suite of many.
    (site,) = (site for site in of_layer_1 if site["site"] == "moe_delta")
    alone = mm2.assert_site(recording["moe_delta"], layer, "moe_delta")
    assert alone.nearest is not None
    assert alone.nearest.limit == pytest.approx(site["nearest"]["limit"])


def test_folders_are_compared_as_mm2_compare_does(golden: Path, swept: Path) -> None:
    comparison = mm2.compare(str(golden), swept)
    assert (comparison.verdict, comparison.of) == ("pass", 68)
    with mm2.open_golden(golden) as opened:
        assert mm2.compare(opened, swept).require()
    with pytest.raises(mm2.UsageError, match="4 results for output"):
        comparison.site("output")
    assert comparison.site("output", layer=1).status == "pass"


def test_port_on_another_input_is_not_compared(example: Example, layer: mm2.GoldenLayer) -> None:
    port = layer.load(example("minimal_port.py"))
    with mm2.record(port) as recording:
        port(layer.input * 1.01, layer.attention_mask, layer.position_ids)
    with pytest.raises(mm2.IncomparableError, match="layer 1 got other hidden states"):
        mm2.compare(layer, recording)


def test_two_recordings_are_compared_without_a_golden(run: Run, example: Example, swapped: Any) -> None:
    right = run(example("minimal_port.py"))
    assert mm2.compare(right, run(example("port.py")))
    wrong = mm2.compare(right, run(swapped))
    assert not wrong
    assert "no noise floor" in str(wrong)


def test_site_is_asserted(run: Run, example: Example, layer: mm2.GoldenLayer) -> None:
    recording = run(example("minimal_port.py"))
    for site in ("q_norm", "attn_delta", "router_logits", "moe_delta", "output"):
        assert mm2.assert_site(recording[site], layer, site).status == "pass"
    # A component on the golden's values: [B·S,H] is as good as [B,S,H].
    moe = layer.load(example("minimal_port.py")).block_sparse_moe(layer.read("post_norm"))
    assert mm2.assert_site(moe.flatten(0, 1), layer, "moe_delta").status == "pass"


def test_wrong_site_fails_with_rho_limit_and_place(run: Run, swapped: Any, layer: mm2.GoldenLayer) -> None:
    recording = run(swapped)
    mm2.assert_site(recording["post_norm"], layer, "post_norm")
    message = (
        r"layer 1, moe_delta: error .*× the noise floor, limit .*\n  ρ .*row \d+, token \d+, channel \d+"
    )
    with pytest.raises(AssertionError, match=message):
        mm2.assert_site(recording["moe_delta"], layer, "moe_delta")


def test_wrong_experts_are_asserted(layer: mm2.GoldenLayer) -> None:
    experts = layer.read("router_experts")
    assert mm2.assert_site(experts.flip(-1), layer, "router_experts").status == "pass"  # a set
    with pytest.raises(mm2.PortDiffersError, match="layer 1, router_experts"):
        mm2.assert_site((experts + 1) % 32, layer, "router_experts")


def test_unusable_tensor_fails(layer: mm2.GoldenLayer) -> None:
    states = layer.read("attn_delta")
    with pytest.raises(mm2.PortDiffersError, match="shape: expected"):
        mm2.assert_site(states[:, :-1], layer, "attn_delta")
    with pytest.raises(mm2.PortDiffersError, match="NaN or Inf on real tokens"):
        mm2.assert_site(states.masked_fill(states == states[0, 3, 5], torch.nan), layer, "attn_delta")


def test_tensor_in_float32_passes_and_one_in_float16_warns(layer: mm2.GoldenLayer) -> None:
    assert mm2.assert_site(layer.read("attn_delta").float(), layer, "attn_delta").status == "pass"
    with pytest.warns(mm2.PortWarning, match="expected torch.bfloat16, found torch.float16"):
        mm2.assert_site(layer.read("attn_delta").half(), layer, "attn_delta")


def test_site_that_the_golden_lacks_is_an_error(toy: Path, tmp_path: Path, command: Any) -> None:
    from gpu_reference.cli import main as mm2_gpu

    options = ("--seq-len", 12, "--sites", "layer", "--output-dir", tmp_path / "golden", "--quiet")
    command(mm2_gpu, "single-layer", "--layer", 0, "--model", toy, *options)
    with mm2.open_golden(tmp_path / "golden") as opened:
        layer = opened.layer(0)
        with pytest.raises(
            mm2.IncomparableError, match="moe_delta was not judged: found the golden was captured"
        ):
            mm2.assert_site(layer.input, layer, "moe_delta")


def test_captures_at_addresses_are_compared(s3: Any) -> None:
    for name in ("golden", "swapped"):
        for path in (OLD / name).iterdir():
            s3.objects.put_object(Bucket="lab", Key=f"{name}/{path.name}", Body=path.read_bytes())
    comparison = mm2.compare("s3://lab/golden", "s3://lab/swapped")
    here = mm2.compare(OLD / "golden", OLD / "swapped")
    assert (comparison.verdict, comparison.blame) == (here.verdict, here.blame)
    assert "golden  s3://lab/golden" in str(comparison)
    golden = mm2.open_golden("s3://lab/golden", model=OLD / "toy")
    local = mm2.open_golden(OLD / "golden", model=OLD / "toy")
    assert torch.equal(golden.layer(1).input, local.layer(1).input)
    assert repr(golden).startswith("GoldenLayers(s3://lab/golden, ")
    assert mm2.compare(golden, "s3://lab/swapped").blame == here.blame
    with pytest.raises(mm2.UsageError, match="'gs://lab/run' is no address that mm2 reads"):
        mm2.compare(golden, "gs://lab/run")


def test_recording_needs_to_know_its_layer(run: Run, example: Example, layers: mm2.GoldenLayers) -> None:
    with pytest.raises(mm2.UsageError, match=r"does not say which.*golden.layer\(NUMBER\)"):
        mm2.compare(layers, run(example("minimal_port.py")))


def test_padding_is_not_judged(layer: mm2.GoldenLayer) -> None:
    states = layer.read("attn_delta").clone()
    states[1, 40:] = torch.nan  # row 1 has 33 tokens
    assert mm2.assert_site(states, layer, "attn_delta").num_judged == 48 + 33


def test_unknown_site_lists_the_sites(layer: mm2.GoldenLayer) -> None:
    with pytest.raises(mm2.UsageError, match="'moe' is no site of a decoder layer: expected one of input"):
        mm2.assert_site(layer.input, layer, "moe")
    with pytest.raises(mm2.UsageError, match="input is given to it"):
        mm2.assert_site(layer.input, layer, "input")


def test_mistake_is_named(run: Run, swapped: Any, layer: mm2.GoldenLayer) -> None:
    diagnosis = mm2.diagnose(layer, run(swapped))
    assert diagnosis.mistakes == ("gate_up_swapped",)
    assert diagnosis.findings[0].leaves < 1.2
    assert "gate_up_swapped" in str(diagnosis)
    assert repr(diagnosis) == "PortDiagnosis(gate_up_swapped)"
    assert [found["mistake"] for found in diagnosis.to_json()["diagnosis"]] == ["gate_up_swapped"]


@pytest.mark.slow
def test_nothing_is_named_in_a_right_port(run: Run, example: Example, layer: mm2.GoldenLayer) -> None:
    diagnosis = mm2.diagnose(layer, run(example("minimal_port.py")))
    assert (diagnosis.mistakes, diagnosis.findings) == ((), ())
    assert repr(diagnosis) == "PortDiagnosis(no known mistake named)"


def test_diagnosis_needs_the_checkpoint(run: Run, swapped: Any, golden: Path) -> None:
    without = mm2.GoldenLayers(Capture.open(golden), weights=None)
    with pytest.raises(CheckpointError, match=r"not on this machine.*--mm2-model DIR"):
        mm2.diagnose(without.layer(1), run(swapped))
