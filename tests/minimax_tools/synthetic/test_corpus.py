from __future__ import annotations

import functools
from pathlib import Path

import pytest

from minimax_tools.errors import UsageError
from minimax_tools.synthetic.corpus import CORPORA, Corpus, read_corpus


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
