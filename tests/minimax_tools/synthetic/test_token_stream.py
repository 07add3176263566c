from __future__ import annotations

import pytest
import tokenizers
import torch

from minimax_tools.errors import UsageError
from minimax_tools.synthetic.token_stream import TokenStream
from minimax_tools.synthetic.toy_tokenizer import find_token_ids, make_tokenizer


@pytest.fixture
def tokenizer() -> tokenizers.Tokenizer:
    return make_tokenizer(["a text"], vocab_size=262)


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
    with pytest.raises(UsageError, match="expected at least 20 tokens.*found 6 tokens.*--seq-len"):
        stream.cut_rows(length=20, most=1)
