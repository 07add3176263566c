"""Decoded rows: which rows of a batch a run that decodes computes one at a time."""

from __future__ import annotations

import torch


def decoded_rows(attention_mask: torch.Tensor, num_rows: int) -> range:
    """The columns of a batch that are decoded, so that of each prompt the last `num_rows` real ones are, at least.

    A prompt that is no longer than that is decoded from its second row on. Behind the last real row nothing is.

    Args:
        attention_mask: [B,S] of 0/1.
        num_rows: How many; less than the longest prompt has.
    """
    real = [prompt.nonzero().flatten().tolist() for prompt in attention_mask]
    starts = [columns[max(len(columns) - num_rows, 1)] for columns in real if len(columns) > 1]
    return range(min(starts), max(columns[-1] for columns in real) + 1)
