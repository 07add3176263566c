"""Token rows of text that a trained model was never shown, for what is measured on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from minimax_tools.errors import CheckpointError
from minimax_tools.text.prompts import InputRequest
from minimax_tools.text.tokenizer import encode_texts

HELD_OUT_NAME = "held_out.txt"


def request_text_rows(
    folder: Path, lengths: Sequence[int], *, seed: int, padding_side: str = "right"
) -> InputRequest:
    """Rows of these lengths, cut from the text beside a trained model; each seed cuts elsewhere.

    Raises:
        CheckpointError: The model has no such text, or too little of it.
    """
    path = folder / HELD_OUT_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {HELD_OUT_NAME}", next_step="Name a model of mm2-split train."
        )
    (tokens,) = encode_texts(folder, [path.read_text(encoding="utf-8")], chat=False)
    if len(tokens) < sum(lengths):
        raise CheckpointError(
            f"{path} is too short", expected=f"{sum(lengths)} tokens", found=str(len(tokens))
        )
    start = seed * 7919 % (len(tokens) - sum(lengths) + 1)
    rows = []
    for length in lengths:
        rows.append(",".join(map(str, tokens[start : start + length])))
        start += length
    return InputRequest(input_ids=tuple(rows), padding_side=padding_side)
