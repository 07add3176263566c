from __future__ import annotations

from pathlib import Path

import pytest

from minimax_tools.errors import CheckpointError
from minimax_tools.text.tokenizer import (
    decode_rows,
    encode_texts,
    has_tokenizer,
    read_end_tokens,
    render_messages,
)

TEXTS = ["The capital of France is", "def f(x):\n    return x", "Grüße, 你好 🙂", "]~b]user"]


def test_raw_text_is_encoded_as_transformers_encodes_it(toy: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(toy)
    assert encode_texts(toy, TEXTS, chat=False) == [tokenizer(text).input_ids for text in TEXTS]


def test_chat_is_encoded_as_transformers_encodes_it(toy: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(toy)
    expected = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True
        ).input_ids
        for text in TEXTS
    ]
    assert encode_texts(toy, TEXTS, chat=True) == expected


def test_rows_are_decoded_with_their_special_tokens(toy: Path) -> None:
    assert decode_rows(toy, encode_texts(toy, TEXTS, chat=False)) == TEXTS
    assert decode_rows(toy, encode_texts(toy, TEXTS[:1], chat=True)) == [
        render_messages(toy, [("user", TEXTS[0])])
    ]


@pytest.mark.parametrize(
    ("value", "expected"), [("3", {3}), ("[3, 4]", {3, 4}), ("[]", set()), ("null", {9})]
)
def test_end_tokens_are_those_of_the_first_file_that_names_them(
    tmp_path: Path, value: str, expected: set[int]
) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert read_end_tokens(tmp_path) == expected


def test_missing_and_damaged_tokenizer_are_told_apart(toy: Path, tmp_path: Path) -> None:
    assert has_tokenizer(toy)
    assert not has_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        decode_rows(tmp_path, [[1]])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        encode_texts(tmp_path, ["a"], chat=False)


@pytest.mark.parametrize("value", ["true", "[true]", "1.0", '"3"', "[[3]]", "{}"])
def test_end_token_that_is_no_id_is_refused_by_name(tmp_path: Path, value: str) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is not a token id"):
        read_end_tokens(tmp_path)
