from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.model.inputs import Inputs, format_positions
from minimax_tools.model.spec import ModelSpec
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.prompts import build_inputs
from minimax_tools.text.tokenizer import encode_texts

PROMPTS = ["The capital of France is", "Count from one to ten:"]


def build(folder: Path, **options: Any) -> Inputs:
    return build_inputs(InputRequest(**options), folder=folder, spec=ModelSpec.from_folder(folder))


def rows(inputs: Inputs) -> list[list[int]]:
    return [
        ids[mask.bool()].tolist() for ids, mask in zip(inputs.input_ids, inputs.attention_mask, strict=True)
    ]


@pytest.mark.parametrize(("chat", "source"), [(False, "prompts"), (True, "chat prompts")])
def test_prompts_are_tokenized_raw_or_as_a_chat(toy: Path, chat: bool, source: str) -> None:
    inputs = build(toy, prompts=tuple(PROMPTS), chat=chat)
    assert rows(inputs) == encode_texts(toy, PROMPTS, chat=chat)
    assert inputs.source == source


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("prompts.txt", "\n".join([PROMPTS[0], "", "  ", PROMPTS[1], ""])),
        ("prompts.json", json.dumps(PROMPTS)),
    ],
)
def test_prompts_file_is_the_same_as_its_prompts(toy: Path, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert rows(build(toy, prompts_file=tmp_path / name)) == rows(build(toy, prompts=tuple(PROMPTS)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"{", "cannot be read: expected UTF-8 text"),
        ("a.json", b'{"prompt": "x"}', "holds no prompts: expected a prompt a line, or a JSON list"),
        ("a.json", b"[1, 2]", "holds no prompts"),
        ("a.json", b"[]", "holds no prompts"),
        ("a.txt", b"\n \n", "holds no prompts"),
        ("a.txt", b"\xff\xfe", "cannot be read: expected UTF-8 text"),
    ],
)
def test_prompts_file_that_holds_none_is_refused(
    toy: Path, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        build(toy, prompts_file=tmp_path / name)


@pytest.mark.parametrize(("text", "expected"), [("[[1, 2], [3]]", [[1, 2], [3]]), ("[1, 2]", [[1, 2]])])
def test_ids_are_read_from_json(toy: Path, tmp_path: Path, text: str, expected: list[list[int]]) -> None:
    (tmp_path / "ids.json").write_text(text)
    assert rows(build(toy, input_ids=(str(tmp_path / "ids.json"),))) == expected


@pytest.mark.parametrize(
    "text", ["{}", "[]x", '[["a"]]', "[[1.5]]", "[[true]]", "[1, [2]]", "7", '{"rows": [[1]]}']
)
def test_json_without_ids_is_refused(toy: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "ids.json").write_text(text)
    with pytest.raises(UsageError, match=r"--input-ids .*ids\.json' cannot be read: expected ids like 1,2,3"):
        build(toy, input_ids=(str(tmp_path / "ids.json"),))


@pytest.mark.parametrize("token", [-1, 512, 2**80])
def test_ids_outside_the_vocabulary_are_refused(toy: Path, token: int) -> None:
    assert rows(build(toy, input_ids=("0,511",))) == [[0, 511]]
    with pytest.raises(UsageError, match=f"row 1 holds the id {token}: expected ids from 0 to 511"):
        build(toy, input_ids=("3", f"3,{token}"))


def test_rows_that_nobody_names_pass_a_window_and_lie_far_out(toy: Path) -> None:
    inputs = build(toy)
    assert inputs.natural().lengths == (144, 16, 16, 16)
    assert format_positions(inputs.natural()) == "positions 0-143, 4088-4103, 65528-65543, 196592-196607"
    assert build(toy, batch_size=2).row_positions() == inputs.row_positions() * 2
    assert build(toy, max_length=4).lengths == (4, 4, 4, 4)


def test_a_row_that_nobody_names_has_a_place_for_every_expert(toy: Path) -> None:
    inputs, spec = build(toy), ModelSpec.from_folder(toy)
    tokens = inputs.expert_tokens
    assert tokens is not None
    assert tokens.count * spec.num_experts_per_tok >= spec.num_local_experts
    assert inputs.is_expert_token.sum() == tokens.count
    # Behind all other tokens of the row, so that none of them attends to it.
    assert inputs.is_expert_token[tokens.row].nonzero()[0] == inputs.natural().lengths[tokens.row]
    assert build(toy, max_length=16).expert_tokens is None
    assert build(toy, seq_lens=(144, 16)).expert_tokens is None


def test_quick_rows_are_short_and_say_so(toy: Path) -> None:
    inputs = build(toy, quick=True)
    assert inputs.lengths == (96, 61)
    assert inputs.is_quick
    assert not build(toy).is_quick
    with pytest.raises(UsageError, match="one of .*--quick"):
        build(toy, quick=True, seq_lens=(3,))


@pytest.mark.parametrize(
    ("num_positions", "positions"),
    [
        (40960, "positions 0-143, 4088-4103, 40944-40959"),
        (160, "positions 0-159"),
        (9, "positions 0-8"),
    ],
)
def test_default_rows_fit_a_small_model(toy: Path, num_positions: int, positions: str) -> None:
    spec = replace(ModelSpec.from_folder(toy), max_position_embeddings=num_positions)
    inputs = build_inputs(InputRequest(), folder=toy, spec=spec)
    assert format_positions(inputs.natural()) == positions
    assert (inputs.expert_tokens is None) == (num_positions < 144)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_begin_where_they_are_told_to(toy: Path, side: str) -> None:
    each = build(toy, input_ids=("1,2,3", "4"), start_positions=(0, 4096), padding_side=side)
    assert each.row_positions() == [[0, 1, 2], [4096]]
    alike = build(toy, input_ids=("1,2,3", "4"), start_positions=(7,), padding_side=side)
    assert alike.row_positions() == [[7, 8, 9], [7]]


def test_start_positions_fit_the_rows_and_the_model(toy: Path) -> None:
    with pytest.raises(
        UsageError, match="gives 2 positions for 3 rows: expected one for all rows, or one for"
    ):
        build(toy, seq_lens=(1, 2, 3), start_positions=(0, 1))
    assert build(toy, seq_lens=(2,), start_positions=(196606,)).row_positions() == [[196606, 196607]]
    with pytest.raises(UsageError, match=r"row 0 begins at position 196607 .* no position past 196607"):
        build(toy, seq_lens=(2,), start_positions=(196607,))


def test_rows_are_truncated_before_they_are_padded(toy: Path) -> None:
    inputs = build(toy, input_ids=("1,2,3,4,5", "6"), max_length=3, pad_to=(4,), padding_side="left")
    assert rows(inputs) == [[1, 2, 3], [6]]
    assert inputs.sequence_length == 4


def test_row_longer_than_the_model_takes_is_refused(toy: Path) -> None:
    spec = replace(ModelSpec.from_folder(toy), max_position_embeddings=4)
    request = InputRequest(input_ids=("1", "1,2,3,4,5"))
    with pytest.raises(
        UsageError, match=r"row 1 has 5 tokens: expected at most 4, .* Truncate it with --max-length"
    ):
        build_inputs(request, folder=toy, spec=spec)
    assert build_inputs(replace(request, max_length=4), folder=toy, spec=spec).lengths == (1, 4)


@pytest.mark.parametrize(("found", "expected"), [(7, 7), (None, 0), (-1, 0), (512, 0), ("x", 0)])
def test_padding_takes_the_models_own_id_where_that_is_one(toy: Path, found: object, expected: int) -> None:
    config = {**json.loads((toy / "config.json").read_text()), "pad_token_id": found}
    request = InputRequest(input_ids=("1,2", "3"))
    inputs = build_inputs(request, folder=toy, spec=ModelSpec.from_config(config))
    assert inputs.input_ids.tolist() == [[1, 2], [3, expected]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": ("a",), "seq_lens": (3,)}, "several sources"),
        ({"prompts_file": Path("a"), "input_ids": ("1",)}, "several sources"),
        ({"prompts": ("a",), "batch_size": 2}, "--batch-size multiplies random rows only"),
        ({"chat": True}, "--chat has no effect without text"),
        ({"start_positions": (3,)}, "--start-positions has no rows to place"),
    ],
)
def test_contradicting_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        InputRequest(**options)


def test_text_without_a_tokenizer_says_what_to_give_instead(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((toy / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json\. Give --input-ids or --seq-len"):
        build(tmp_path, prompts=("a",))
