"""`mm2-test prompts`: right ports pass, and planted mistakes are found where they begin."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
from safetensors.torch import load_file, save_file

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.text.tokenizer import encode_texts
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]

TESTS = Path(__file__).parents[2]
LEARNED = TESTS / "models" / "learned"
PORTS = TESTS / "ports" / "prompt_ports.py"
RIGHT = TESTS.parent / "scripts" / "examples" / "model_port.py"
OTHER_EXPERT = "model.layers.3.block_sparse_moe.experts.5.w2.weight"
PROMPTS = ("It was the best of times, it was the", "Call me", "The old man said that he")
ANSWERS = (" worst of times, it was the age", " Ishmael. Some", " would not go to sea again")


@pytest.fixture(scope="module")
def golden_logits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden_logits")


@pytest.fixture
def prompts(command: Command, golden_logits: Path, tmp_path: Path) -> Callable[..., click.testing.Result]:
    """Run the command on the learned model, golden logits shared by all tests of this file."""

    def run(target: str, *options: object, follows: bool = False) -> click.testing.Result:
        arguments: list[object] = ["--model", LEARNED, "--target", target, "--backend", "cpu"]
        arguments += ["--golden-logits", golden_logits, "--captures", tmp_path / "captures", "--quiet"]
        return command(mm2_test, "prompts", *arguments, *options, *([] if follows else ["--no-follow"]))

    return run


def texts(*, with_answers: bool = True) -> list[str]:
    options: list[str] = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        options += ["--prompt", prompt, *(["--continuation", answer] if with_answers else [])]
    return options


def write_samples(path: Path) -> Path:
    lines = []
    for number, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        record = {
            "doc_id": number,
            "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": {"until": []}}},
            "resps": [[answer]],
            "target": "whale",
            "metrics": ["exact_match"],
            "exact_match": 1.0 if number == 1 else 0.0,
        }
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def loads(result: click.testing.Result) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(result.stdout)
    return record


@pytest.mark.parametrize("target", [f"{RIGHT}:Model", f"{PORTS}:LastToken", f"{PORTS}:Reordered"])
@pytest.mark.parametrize(
    "options", [("--prompts-at-once", 1), ("--padding-side", "left", "--pad-to", "64"), ()]
)
def test_right_port_passes(target: str, options: tuple[object, ...], prompts: Command) -> None:
    result = prompts(target, *texts(), *options, "--json")
    record = loads(result)
    assert (result.exit_code, record["verdict"], record["num_differing"]) == (0, "pass", 0)
    assert record["num_prompts"] == 3
    assert all(one["prefill"]["tokens"] and one["decode"]["tokens"] for one in record["prompts"])


def test_prompt_without_answer_decodes_its_own_end(prompts: Command) -> None:
    record = loads(prompts(f"{RIGHT}:Model", *texts(with_answers=False), "--json"))
    assert {one["num_decoded"] for one in record["prompts"]} == {4}


@pytest.mark.parametrize(
    ("name", "step"), [("RestartedPositions", 1), ("WrongAfterStep", 3), ("LostValues", 4)]
)
def test_mistake_in_decoding_begins_at_its_step(name: str, step: int, prompts: Command) -> None:
    result = prompts(f"{PORTS}:{name}", *texts(), "--json")
    record = loads(result)
    assert (result.exit_code, record["verdict"]) == (1, "fail")
    assert step == min(one["first_step"] for one in record["prompts"] if one["first_step"] is not None)
    for one in record["prompts"]:
        assert not one["prefill"]["beyond"]
        assert one["prefill"]["num_choices"] == 0


def test_wrong_layer_differs_in_the_prefill_of_all(prompts: Command) -> None:
    record = loads(prompts(f"{PORTS}:SwappedGateUp", *texts(), "--json"))
    assert record["num_differing"] == 3
    assert all(one["begins"].startswith("prefill") for one in record["prompts"])


def test_prompt_with_the_wrong_word_is_ranked_first_and_alone_differs(
    prompts: Command, tmp_path: Path
) -> None:
    rows = [[5, 9, 40, 41, 7, 60], [12, 13, 200, 41, 44, 60], [61, 62, 63, 64, 65, 66]]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    golden = tmp_path / "golden"
    arguments = ["full", "--model", LEARNED, "--input-ids", tmp_path / "rows.json", "--max-new-tokens", "1"]
    made = click.testing.CliRunner().invoke(
        mm2_gpu, [str(argument) for argument in (*arguments, "--output-dir", golden, "--quiet")]
    )
    assert made.exit_code == 0, made.output
    record = loads(prompts(f"{PORTS}:WrongWord", "--golden", golden, "--decode", 2, "--json"))
    assert record["num_differing"] == 1
    assert record["prompts"][0]["name"] == "row 1"
    assert record["prompts"][0]["first_token"] == 2
    assert not record["worst_is_right_alone"]


@pytest.mark.parametrize("name", ["SeesPadding", "LastColumn"])
def test_mistake_of_the_batch_is_told_from_one_of_the_prompt(name: str, prompts: Command) -> None:
    side = "left" if name == "SeesPadding" else "right"
    options = (*texts(), "--padding-side", side)
    record = loads(prompts(f"{PORTS}:{name}", *options, "--json"))
    assert record["verdict"] == "fail"
    assert record["worst_is_right_alone"]
    assert "Alone in its batch it is right" in prompts(f"{PORTS}:{name}", *options).stdout
    alone = loads(prompts(f"{PORTS}:{name}", *options, "--prompts-at-once", 1, "--json"))
    assert alone["verdict"] == "pass"


def test_report_shows_samples_with_their_record(prompts: Command, tmp_path: Path) -> None:
    samples = write_samples(tmp_path / "samples_whale.jsonl")
    result = prompts(f"{PORTS}:WrongAfterStep", "--samples", samples)
    assert result.exit_code == 1
    assert result.stdout.startswith("FAIL: 3 of 3 prompts differ beyond noise")
    assert "the prefill is right, it differs from decode step 3 on" in result.stdout
    assert "worst of times, it was the age (wrong)" in result.stdout
    assert "First differing choice, decode step 3" in result.stdout
    wrong = loads(prompts(f"{RIGHT}:Model", "--samples", samples, "--wrong", "--json"))
    assert [one["is_right"] for one in wrong["prompts"]] == [False, False]


def test_golden_logits_are_computed_once(command: Command, tmp_path: Path) -> None:
    arguments = ["prompts", "--model", LEARNED, "--captures", tmp_path, "--quiet", "--json", *texts()]
    assert loads(command(mm2_test, *arguments))["num_known"] == 0
    judged = command(mm2_test, *arguments, "--target", f"{RIGHT}:Model", "--backend", "cpu")
    assert loads(judged)["num_known"] == 3
    model = tmp_path / "model"
    shutil.copytree(LEARNED, model)
    shard = sorted(model.glob("*.safetensors"))[-1]
    tensors = load_file(shard)
    name = next(name for name in sorted(tensors) if tensors[name].ndim == 2)
    tensors[name] *= 1.5
    save_file(tensors, shard, metadata={"format": "pt"})
    arguments[2] = model
    assert loads(command(mm2_test, *arguments))["num_known"] == 0


def test_killed_run_continues_behind_its_last_batch(
    prompts: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = tmp_path / "passes.txt"
    monkeypatch.setenv("COUNTED_PASSES", str(counted))
    options = (*texts(with_answers=False), "--prompts-at-once", 1, "--json")
    monkeypatch.setenv("MOST_PASSES", "7")  # five passes a batch: the second one dies
    assert prompts(f"{PORTS}:Counting", *options).exit_code == 3
    counted.unlink()
    monkeypatch.delenv("MOST_PASSES")
    assert prompts(f"{PORTS}:Counting", *options).exit_code == 0
    assert len(counted.read_text().splitlines()) == 10
    # What is on record is only judged again.
    assert prompts(f"{PORTS}:Counting", *options).exit_code == 0
    assert len(counted.read_text().splitlines()) == 10


def test_golden_of_other_weights_is_refused(prompts: Command, command: Command, tmp_path: Path) -> None:
    """The fingerprint agrees: lm_head is not part of it. The logits tell."""
    model = tmp_path / "model"
    shutil.copytree(LEARNED, model)
    for shard in sorted(model.glob("*.safetensors")):
        tensors = load_file(shard)
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)
            save_file(tensors, shard, metadata={"format": "pt"})
    arguments = ["full", "--model", model, "--input-ids", "5,9,40,41,7,60", "--max-new-tokens", "1"]
    assert command(mm2_gpu, *arguments, "--output-dir", tmp_path / "golden", "--quiet").exit_code == 0
    result = prompts(f"{RIGHT}:Model", "--golden", tmp_path / "golden", "--decode", 2)
    assert result.exit_code == 3
    assert "are not those of mm2's reference" in result.stderr
    assert f"mm2-gpu extract-all --model {LEARNED}" in result.stderr


def test_golden_of_which_few_tokens_differ_is_taken_once_it_is_certified(
    prompts: Command, command: Command, tmp_path: Path
) -> None:
    """The golden is of a model with one other expert, which no fingerprint covers."""
    model, golden = tmp_path / "model", tmp_path / "golden"
    shutil.copytree(LEARNED, model)
    for shard in sorted(model.glob("*.safetensors")):
        tensors = load_file(shard)
        if OTHER_EXPERT in tensors:
            tensors[OTHER_EXPERT] *= 2
            save_file(tensors, shard, metadata={"format": "pt"})
    text = (LEARNED / "held_out.txt").read_text(encoding="utf-8")
    (tokens,) = encode_texts(LEARNED, [text], chat=False)
    (tmp_path / "rows.json").write_text(json.dumps([tokens[5000:5060], tokens[9000:9050]]))
    arguments = ["full", "--model", model, "--input-ids", tmp_path / "rows.json", "--max-new-tokens", "1"]
    assert command(mm2_gpu, *arguments, "--output-dir", golden, "--quiet").exit_code == 0
    refused = prompts(f"{RIGHT}:Model", "--golden", golden)
    certify = ["certify", "--model", str(LEARNED), "--golden", str(golden)]
    assert refused.exit_code == 3
    assert shlex.join(["mm2-gpu", *certify]) in refused.stderr
    # Followed, the command tells that the golden is of other weights.
    assert command(mm2_gpu, *certify, "--quiet").exit_code == 1
    assert prompts(f"{RIGHT}:Model", "--golden", golden).exit_code == 3
    # With its own model it is certified. Still its wrong tokens excuse no port.
    assert command(mm2_gpu, "certify", "--model", model, "--golden", golden, "--quiet").exit_code == 0
    assert prompts(f"{RIGHT}:Model", "--golden", golden).exit_code == 0
    wrong = prompts(f"{PORTS}:OtherExpert", "--golden", golden, "--json")
    assert (wrong.exit_code, loads(wrong)["num_differing"]) == (1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "the prompts come from none or several sources"),
        (("--prompt", "a", "--wrong"), "--wrong has no samples to choose from"),
        (("--prompt", "a", "--prompt", "b", "--continuation", "c"), "1 answers for 2 prompts"),
    ],
)
def test_wrong_usage_is_refused(options: tuple[str, ...], message: str, prompts: Command) -> None:
    result = prompts(f"{RIGHT}:Model", *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_logits_of_one_shard_are_refused(prompts: Command) -> None:
    result = prompts(f"{PORTS}:Short", *texts())
    assert result.exit_code == 3
    assert "do not cover the vocabulary" in result.stderr


@pytest.mark.slow
def test_worst_prompt_is_followed_to_its_layer(prompts: Command) -> None:
    result = prompts(f"{PORTS}:SwappedGateUp", *texts(), "--json", follows=True)
    record = loads(result)
    assert result.exit_code == 1
    followed = record["followed"]
    assert followed["exit_code"] == 1
    assert [command.split()[0:2] for command in followed["commands"]] == [
        ["mm2-gpu", "full"],
        ["mm2-test", "model"],
    ]
    assert followed["report"]["blame"][0]["layer"] == 2
    assert followed["report"]["blame"][0]["sites"] == ["moe_delta"]
