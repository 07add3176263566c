"""Generation: what the golden model says next, greedily or sampled, kept beside its activations."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minimax_tools.errors import UsageError
from minimax_tools.inputs import Inputs
from minimax_tools.prompts import decode_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GENERATION_NAME = "generation.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen; greedy unless `do_sample`.

    Args:
        max_new_tokens: How many tokens to generate, at most.
        do_sample: Draw instead of taking the most likely token.
        temperature: Divisor of the logits, with `do_sample`.
        top_k: Draw among so many tokens, with `do_sample`; None for all.
        top_p: Draw among the tokens that hold this share of the probability, with `do_sample`.
        seed: Seed of the draws.
    """

    max_new_tokens: int
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        given = {"--temperature": self.temperature, "--top-k": self.top_k, "--top-p": self.top_p}
        unused = [name for name, value in given.items() if value is not None]
        if unused and not self.do_sample:
            raise UsageError(
                f"{', '.join(unused)} has no effect on greedy generation", next_step="Add --do-sample, or leave it out."
            )

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of transformers' `generate`."""
        if not self.do_sample:
            return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        return {
            "do_sample": True,
            "temperature": self.temperature or 1.0,
            "top_k": self.top_k or 0,
            "top_p": self.top_p or 1.0,
        }


def generate(model: PreTrainedModel, inputs: Inputs, sampling: Sampling, *, folder: Path) -> dict[str, Any]:
    """Continue every row of `inputs` and return ids and text, as they are stored in `generation.json`.

    Rows run one by one, without padding, so that a row's tokens do not depend on its neighbours.
    """
    torch.manual_seed(sampling.seed)
    rows = [_continue_row(model, row, sampling) for row in _real_rows(inputs)]
    texts = _texts(folder, rows)
    return {
        "sampling": asdict(sampling),
        "rows": [
            {"prompt_ids": prompt, "generated_ids": new, "text": text}
            for prompt, new, text in zip(_real_rows(inputs), rows, texts, strict=True)
        ],
    }


def _real_rows(inputs: Inputs) -> list[list[int]]:
    return [
        ids[mask.bool()].tolist() for ids, mask in zip(inputs.input_ids, inputs.attention_mask, strict=True)
    ]


def _continue_row(model: PreTrainedModel, row: list[int], sampling: Sampling) -> list[int]:
    device = model.get_submodule("model.embed_tokens").weight.device
    input_ids = torch.tensor([row], device="cpu" if device.type == "meta" else device)
    with torch.no_grad():
        output = model.generate(  # type: ignore[operator]  # transformers types `generate` as a Tensor | Module
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=sampling.max_new_tokens,
            pad_token_id=0,
            **sampling.arguments(),
        )
    new: list[int] = output[0, len(row) :].tolist()
    return new


def _texts(folder: Path, rows: list[list[int]]) -> list[str | None]:
    """The rows' text; None where the checkpoint has no tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        return [None] * len(rows)
    return list(decode_tokens(folder, rows))
