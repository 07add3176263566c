from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click.testing
import pytest
import torch

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import UsageError
from minimax_tools.model import weight_names
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.learned import PROMPT_LENGTHS, LearnedModel, train_checkpoint
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.synthetic.training import TrainingOptions
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.prompts import build_inputs

Command = Callable[..., click.testing.Result]


def held_out_inputs(folder: Path) -> Inputs:
    request = InputRequest(prompts_file=folder / "held_out.json")
    return build_inputs(request, folder=folder, spec=ModelSpec.from_folder(folder))


@pytest.mark.parametrize("number", [0, 1], ids=["bf16", "fp8"])
def test_golden_of_held_out_text_is_certified(
    learned: LearnedModel, number: int, command: Command, tmp_path: Path
) -> None:
    folder = learned.folders[number]
    result = command(
        mm2_gpu,
        *("extract-all", "--model", folder, "--prompts-file", folder / "held_out.json"),
        *("--max-length", 40, "--output-dir", tmp_path / "golden", "--certify", "--quiet"),
    )
    assert result.exit_code == 0, result.output


def test_router_is_float32_and_the_rest_bf16(learned_bf16: Path) -> None:
    with CheckpointReader(learned_bf16) as reader:
        dtypes = {name: reader.index[name].dtype.as_torch() for name in reader.index.names}
    router = {name for name in dtypes if name.endswith(weight_names.FLOAT32_NAMES)}
    assert {dtypes[name] for name in router} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if name not in router} == {torch.bfloat16}


def test_copies_in_fp8_and_bf16_are_one_model_to_fp8s_rounding(learned: LearnedModel) -> None:
    name = weight_names.layer_prefix(1) + weight_names.expert_weight(3, weight_names.EXPERT_DOWN)
    with CheckpointReader(learned.folders[0]) as bf16, CheckpointReader(learned.folders[1]) as fp8:
        weight = bf16.read(name).float()
        assert fp8.read(name).dtype == torch.float8_e4m3fn
        difference = fp8.read_weight(name, torch.float32) - weight
    assert 0 < float(difference.norm() / weight.norm()) < 0.05


def test_held_out_prompts_are_rows_of_1_to_500_tokens(learned_bf16: Path) -> None:
    lengths = held_out_inputs(learned_bf16).attention_mask.sum(1).tolist()
    assert lengths == list(PROMPT_LENGTHS)
    assert (min(lengths), max(lengths)) == (1, 500)


def test_held_out_prompts_are_in_the_held_out_text_and_not_in_the_rest(learned: LearnedModel) -> None:
    folder = learned.folders[0]
    prompts = json.loads((folder / "held_out.json").read_text())
    held_out = (folder / "held_out.txt").read_text()
    assert all(prompt in held_out for prompt in prompts)
    longest = max(prompts, key=len)
    assert all(longest not in passage for passage in learned.corpus.training)


def test_model_knows_more_of_text_it_never_saw_than_byte_counts_do(learned: LearnedModel) -> None:
    assert learned.after.bits_per_byte < learned.rivals.unigram < learned.before.bits_per_byte
    assert learned.rivals.lzma < learned.rivals.unigram


def test_record_tells_how_to_train_it_again(learned: LearnedModel) -> None:
    record = json.loads((learned.folders[0] / "training.json").read_text())
    assert record["options"]["num_steps"] == 30
    assert record["text"]["sha256"] == learned.corpus.sha256
    assert record["machine"]["torch"] == torch.__version__
    assert record["after"]["bits_per_byte"] == learned.after.bits_per_byte


def test_occupied_folder_is_refused_before_the_training(tmp_path: Path, learned: LearnedModel) -> None:
    (tmp_path / "there").write_text("something")
    options = TrainingOptions(
        num_steps=10**9,
        minutes=None,
        batch_size=1,
        seq_len=8,
        learning_rate=1e-3,
        bias_rate=0.0,
        seed=0,
    )
    with pytest.raises(UsageError, match="exists"):
        train_checkpoint(
            {tmp_path: torch.bfloat16}, model=SyntheticModel(), texts=("prose",), options=options
        )
