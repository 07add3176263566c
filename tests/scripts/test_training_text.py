from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import tokenizers
import torch

from minimax_tools.errors import UsageError
from minimax_tools.synthetic.toy_tokenizer import find_token_ids, make_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from training.text import CORPORA, Corpus, TokenStream, read_corpus


@pytest.fixture
def tokenizer() -> tokenizers.Tokenizer:
    return make_tokenizer(["a text"], vocab_size=262)


@functools.cache
def corpus_of(name: str) -> Corpus:
    return read_corpus((name,))


def paragraphs(passages: tuple[str, ...]) -> set[str]:
    return {" ".join(part.split()) for passage in passages for part in passage.split("\n\n") if part.strip()}


@pytest.mark.parametrize("name", CORPORA)
def test_every_corpus_has_enough_text_to_learn_from(name: str) -> None:
    corpus = corpus_of(name)
    assert corpus.training_bytes > 200_000
    assert 0.02 < sum(map(len, corpus.held_out)) / corpus.training_bytes < 0.08


def test_corpora_differ() -> None:
    assert len({corpus_of(name).sha256 for name in CORPORA}) == len(CORPORA)


def test_corpus_is_read_the_same_again() -> None:
    assert read_corpus(("licences",)) == corpus_of("licences")


def test_paragraph_held_out_was_never_trained_on() -> None:
    corpus = corpus_of("python-asyncio-and-email")
    both = paragraphs(corpus.training) & paragraphs(corpus.held_out)
    # A passage may end within a paragraph, whose parts may be lines that occur elsewhere too.
    assert all(len(part) < 100 for part in both)


def test_own_files_follow_one_another(tmp_path: Path) -> None:
    for name in ("one", "two"):
        text = "\n\n".join(f"Paragraph {number} of {name}." for number in range(1000))
        (tmp_path / name).write_text(text)
    corpus = read_corpus((str(tmp_path / "one"), str(tmp_path / "two")))
    assert corpus.training[0].startswith("Paragraph 0 of one.")
    assert "Paragraph 500 of two." in "".join(corpus.training)


def test_paragraph_that_occurs_twice_is_kept_once(tmp_path: Path) -> None:
    text = "\n\n".join(f"Paragraph {number}.\n\nAll rights  reserved." for number in range(2000))
    (tmp_path / "text").write_text(text)
    corpus: Corpus = read_corpus((str(tmp_path / "text"),))
    assert "".join((*corpus.training, *corpus.held_out)).count("reserved") == 1


def test_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Too little.")
    with pytest.raises(UsageError, match="too little text.*expected more than 4096 bytes"):
        read_corpus((str(tmp_path / "text"),))


def test_unknown_name_lists_the_corpora(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read.*python-asyncio-and-email"):
        read_corpus((str(tmp_path / "absent"),))


def test_passages_come_back_with_an_end_after_each(tokenizer: tokenizers.Tokenizer) -> None:
    stream = TokenStream(("First – one.", "Second."), tokenizer=tokenizer)
    end = find_token_ids(tokenizer).eos_token_id
    assert int((stream.ids == end).sum()) == 2
    assert tokenizer.decode(stream.ids.tolist(), skip_special_tokens=True) == "First – one.Second."
    assert stream.bytes_per_token == (14 + 7) / (14 + 7 + 2)


def test_rows_are_stretches_of_the_text_and_follow_the_seed(tokenizer: tokenizers.Tokenizer) -> None:
    text = "".join(chr(97 + number % 26) for number in range(200))
    stream = TokenStream((text,), tokenizer=tokenizer)
    first, second = (
        stream.draw_rows(num_rows=3, length=20, generator=torch.Generator().manual_seed(1)) for _ in range(2)
    )
    assert torch.equal(first, second)
    assert first.shape == (3, 20)
    assert all(tokenizer.decode(row.tolist()) in text for row in first)


def test_cut_rows_do_not_overlap(tokenizer: tokenizers.Tokenizer) -> None:
    stream = TokenStream(("x" * 99,), tokenizer=tokenizer)
    assert stream.cut_rows(length=30, most=9).shape == (3, 30)
    assert stream.cut_rows(length=30, most=2).shape == (2, 30)


def test_row_longer_than_the_text_is_refused(tokenizer: tokenizers.Tokenizer) -> None:
    stream = TokenStream(("short",), tokenizer=tokenizer)
    with pytest.raises(UsageError, match="expected at least 20 tokens.*found 6 tokens.*more --text"):
        stream.cut_rows(length=20, most=1)
