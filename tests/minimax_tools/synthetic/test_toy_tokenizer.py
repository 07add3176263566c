from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
import tokenizers

from minimax_tools.synthetic.toy_tokenizer import write_tokenizer

TEXT = "The router of layer 7 isn't sure: naïve café, 東京, x_1 += 0.5\n\tdone."
MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


def make(folder: Path, vocab_size: int = 512) -> tokenizers.Tokenizer:
    write_tokenizer(folder, vocab_size=vocab_size)
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("vocab_size", [262, 300, 512, 200_064])
def test_every_text_is_encoded_below_the_vocabulary_and_comes_back(vocab_size: int, tmp_path: Path) -> None:
    tokenizer = make(tmp_path, vocab_size)
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT
    assert max(tokenizer.get_vocab().values()) == tokenizer.get_vocab_size() - 1 < vocab_size


def test_larger_vocabulary_gives_shorter_rows(tmp_path: Path) -> None:
    text = "The answer of each layer is added to the stream."
    small, large = (len(make(tmp_path, size).encode(text).ids) for size in (262, 512))
    assert large < small


def test_special_tokens_have_the_ids_that_were_returned(tmp_path: Path) -> None:
    ids = write_tokenizer(tmp_path, vocab_size=512)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("]~!b[[e~[").ids == [ids.bos_token_id, ids.eos_token_id]


def test_chat_template_frames_each_turn(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size=512)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(settings["chat_template"])
    assert template.render(messages=MESSAGES, add_generation_prompt=True) == (
        "]~!b[]~b]system\nYou are a helpful assistant.[e~[\n"
        "]~b]user\nHello[e~[\n]~b]ai\nHi[e~[\n]~b]ai\n<think>\n"
    )
    system = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    text = template.render(messages=system, add_generation_prompt=False)
    assert text.startswith("]~!b[]~b]system\nBe brief.[e~[\n]~b]user\n")
    assert text.endswith("Hi[e~[\n")


def test_transformers_reads_tokenizer_and_template(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra golden is not installed")
    ids = write_tokenizer(tmp_path, vocab_size=512)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == ids.eos_token_id
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False).endswith("]~b]ai\nHi[e~[\n")
