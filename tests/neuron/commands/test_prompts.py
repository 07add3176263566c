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
import torch
from safetensors.torch import load_file, save_file

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.checkpoint.index import TensorIndex
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

ALONE = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
ANSWERED = [*ALONE, *(word for answer in ANSWERS for word in ("--continuation", answer))]


@pytest.fixture(scope="module")
def golden_logits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden_logits")


@pytest.fixture
def prompts(command: Command, golden_logits: Path, tmp_path: Path) -> Callable[..., click.testing.Result]:
    """Runs a port on the learned model: one of the ports, or the right one; all tests share golden logits."""

    def run(port: str, *options: object, follows: bool = False) -> click.testing.Result:
        target = f"{PORTS}:{port}" if port else f"{RIGHT}:Model"
        arguments = ("--model", LEARNED, "--target", target, "--backend", "cpu", "--quiet", *options)
        places = ("--golden-logits", golden_logits, "--captures", tmp_path / "captures")
        return command(mm2_test, "prompts", *arguments, *places, *(() if follows else ("--no-follow",)))

    return run


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[str, Callable[[torch.Tensor], torch.Tensor]], Path]:
    """Copies the learned model with one of its tensors changed."""

    def copy(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
        folder = shutil.copytree(LEARNED, tmp_path / "model")
        shard = TensorIndex.from_folder(folder)[name].file
        tensors = load_file(shard)
        save_file({**tensors, name: change(tensors[name])}, shard, metadata={"format": "pt"})
        return folder

    return copy


@pytest.fixture
def make(command: Command, tmp_path: Path) -> Callable[..., Path]:
    """Makes a golden of a model's rows, and gives its folder."""

    def golden(model: Path, rows: list[list[int]]) -> Path:
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        given = ("--input-ids", tmp_path / "rows.json", "--max-new-tokens", 1)
        place = ("--output-dir", tmp_path / "golden", "--quiet")
        assert command(mm2_gpu, "full", "--model", model, *given, *place).exit_code == 0
        return tmp_path / "golden"

    return golden


def loads(result: click.testing.Result) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(result.stdout)
    return record


@pytest.mark.parametrize(
    ("port", "options"),
    [
        ("", ()),
        ("", ("--prompts-at-once", 1)),
        ("", ("--padding-side", "left", "--pad-to", "64")),
        ("LastToken", ()),
        ("LastToken", ("--padding-side", "left", "--pad-to", "64")),
        ("Reordered", ()),
    ],
)
def test_right_port_passes(port: str, options: tuple[object, ...], prompts: Command) -> None:
    result = prompts(port, *ANSWERED, *options, "--json")
    record = loads(result)
    assert (result.exit_code, record["verdict"], record["num_differing"]) == (0, "pass", 0)
    assert record["num_prompts"] == 3
    assert all(one["prefill"]["tokens"] and one["decode"]["tokens"] for one in record["prompts"])


def test_prompt_without_answer_decodes_its_own_end(prompts: Command) -> None:
    record = loads(prompts("", *ALONE, "--json"))
    assert {one["num_decoded"] for one in record["prompts"]} == {4}


@pytest.mark.parametrize(("name", "step"), [("RestartedPositions", 1), ("LostValues", 4)])
def test_mistake_in_decoding_begins_at_its_step(name: str, step: int, prompts: Command) -> None:
    result = prompts(name, *ANSWERED, "--json")
    record = loads(result)
    assert (result.exit_code, record["verdict"]) == (1, "fail")
    assert step == min(one["first_step"] for one in record["prompts"] if one["first_step"] is not None)
    for one in record["prompts"]:
        assert not one["prefill"]["beyond"]
        assert one["prefill"]["num_choices"] == 0


def test_wrong_layer_differs_in_the_prefill_of_all(prompts: Command) -> None:
    record = loads(prompts("SwappedGateUp", *ANSWERED, "--json"))
    assert record["num_differing"] == 3
    assert all(one["begins"].startswith("prefill") for one in record["prompts"])


def test_prompt_with_the_wrong_word_is_ranked_first_and_alone_differs(
    prompts: Command, make: Callable[..., Path]
) -> None:
    rows = [[5, 9, 40, 41, 7, 60], [12, 13, 200, 41, 44, 60], [61, 62, 63, 64, 65, 66]]
    golden = make(LEARNED, rows)
    record = loads(prompts("WrongWord", "--golden", golden, "--decode", 2, "--json"))
    assert record["num_differing"] == 1
    assert record["prompts"][0]["name"] == "row 1"
    assert record["prompts"][0]["first_token"] == 2
    assert not record["worst_is_right_alone"]


@pytest.mark.parametrize("name", ["SeesPadding", "LastColumn"])
def test_mistake_of_the_batch_is_told_from_one_of_the_prompt(name: str, prompts: Command) -> None:
    side = "left" if name == "SeesPadding" else "right"
    options = (*ANSWERED, "--padding-side", side)
    record = loads(prompts(name, *options, "--json"))
    assert (record["verdict"], record["worst_is_right_alone"]) == ("fail", True)
    assert "Alone in its batch it is right" in prompts(name, *options).stdout
    alone = loads(prompts(name, *options, "--prompts-at-once", 1, "--json"))
    assert alone["verdict"] == "pass"


def test_report_shows_samples_with_their_record(prompts: Command, tmp_path: Path) -> None:
    samples = tmp_path / "samples_whale.jsonl"
    records = [
        {
            "doc_id": number,
            "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": {"until": []}}},
            "resps": [[answer]],
            "target": "whale",
            "metrics": ["exact_match"],
            "exact_match": 1.0 if number == 1 else 0.0,
        }
        for number, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True))
    ]
    samples.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    result = prompts("WrongAfterStep", "--samples", samples)
    assert result.exit_code == 1
    assert result.stdout.startswith("FAIL: 3 of 3 prompts differ beyond noise")
    assert "the prefill is right, it differs from decode step 3 on" in result.stdout
    assert "worst of times, it was the age (wrong)" in result.stdout
    assert "First differing choice, decode step 3" in result.stdout
    wrong = loads(prompts("", "--samples", samples, "--wrong", "--json"))
    assert [one["is_right"] for one in wrong["prompts"]] == [False, False]


def test_golden_logits_are_computed_once(
    command: Command, changed: Callable[..., Path], tmp_path: Path
) -> None:
    options = ("--captures", tmp_path, "--quiet", "--json", *ANSWERED)
    assert loads(command(mm2_test, "prompts", "--model", LEARNED, *options))["num_known"] == 0
    target = ("--target", f"{RIGHT}:Model", "--backend", "cpu")
    assert loads(command(mm2_test, "prompts", "--model", LEARNED, *options, *target))["num_known"] == 3
    model = changed("model.layers.3.self_attn.q_proj.weight", lambda tensor: tensor * 1.5)
    assert loads(command(mm2_test, "prompts", "--model", model, *options))["num_known"] == 0


def test_killed_run_continues_behind_its_last_batch(
    prompts: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = tmp_path / "passes.txt"
    monkeypatch.setenv("COUNTED_PASSES", str(counted))
    options = (*ALONE, "--prompts-at-once", 1, "--json")
    monkeypatch.setenv("MOST_PASSES", "7")  # five passes a batch: the second one dies
    assert prompts("Counting", *options).exit_code == 3
    counted.unlink()
    monkeypatch.delenv("MOST_PASSES")
    assert prompts("Counting", *options).exit_code == 0
    assert len(counted.read_text().splitlines()) == 10
    # What is on record is only judged again.
    assert prompts("Counting", *options).exit_code == 0
    assert len(counted.read_text().splitlines()) == 10


def test_golden_of_other_weights_is_refused(
    prompts: Command, make: Callable[..., Path], changed: Callable[..., Path]
) -> None:
    """The fingerprint agrees: lm_head is not part of it. The logits tell."""
    golden = make(changed("lm_head.weight", lambda tensor: tensor.roll(1, 0)), [[5, 9, 40, 41, 7, 60]])
    result = prompts("", "--golden", golden, "--decode", 2)
    assert result.exit_code == 3
    assert "are not those of mm2's reference" in result.stderr
    assert f"mm2-gpu extract-all --model {LEARNED}" in result.stderr


@pytest.mark.slow
def test_golden_of_which_few_tokens_differ_is_taken_once_it_is_certified(
    prompts: Command, command: Command, make: Callable[..., Path], changed: Callable[..., Path]
) -> None:
    """The golden is of a model with one other expert, which no fingerprint covers."""
    model = changed(OTHER_EXPERT, lambda tensor: tensor * 2)
    text = (LEARNED / "held_out.txt").read_text(encoding="utf-8")
    (tokens,) = encode_texts(LEARNED, [text], chat=False)
    golden = make(model, [tokens[5000:5060], tokens[9000:9050]])
    refused = prompts("", "--golden", golden)
    certify = ["certify", "--model", str(LEARNED), "--golden", str(golden)]
    assert refused.exit_code == 3
    assert shlex.join(["mm2-gpu", *certify]) in refused.stderr
    # Followed, the command tells that the golden is of other weights.
    assert command(mm2_gpu, *certify, "--quiet").exit_code == 1
    assert prompts("", "--golden", golden).exit_code == 3
    # With its own model it is certified. Still its wrong tokens excuse no port.
    assert command(mm2_gpu, "certify", "--model", model, "--golden", golden, "--quiet").exit_code == 0
    assert prompts("", "--golden", golden).exit_code == 0
    wrong = prompts("OtherExpert", "--golden", golden, "--json")
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
    result = prompts("", *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_logits_of_one_shard_are_refused(prompts: Command) -> None:
    result = prompts("Short", *ANSWERED)
    assert (result.exit_code, "do not cover the vocabulary" in result.stderr) == (3, True)


@pytest.mark.slow
def test_worst_prompt_is_followed_to_its_layer(prompts: Command) -> None:
    result = prompts("SwappedGateUp", *ANSWERED, "--json", follows=True)
    record = loads(result)
    assert result.exit_code == 1
    followed = record["followed"]
    assert followed["exit_code"] == 1
    programs = [command.split()[:2] for command in followed["commands"]]
    assert programs == [["mm2-gpu", "full"], ["mm2-test", "model"]]
    blame = followed["report"]["blame"][0]
    assert (blame["layer"], blame["sites"]) == (2, ["moe_delta"])
