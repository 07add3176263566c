"""Sampling: the choice of the next token when the golden model generates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minimax_tools.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The choice of the next token: greedy unless `do_sample`.

    Raises:
        UsageError: `temperature`, `top_k` or `top_p` is given without `do_sample`.
    """

    max_new_tokens: int  # most tokens to generate
    do_sample: bool = False  # whether to draw instead of taking the most likely token
    temperature: float | None = None  # divisor of the logits; None for 1
    top_k: int | None = None  # number of most likely tokens to draw among; None for all
    top_p: float | None = None  # share of the probability that the tokens drawn among hold; None for all
    seed: int = 0  # seed of the draws

    def __post_init__(self) -> None:
        given = {"--temperature": self.temperature, "--top-k": self.top_k, "--top-p": self.top_p}
        unused = [name for name, value in given.items() if value is not None]
        if unused and not self.do_sample:
            raise UsageError(
                f"{', '.join(unused)} has no effect on greedy generation",
                next_step="Add --do-sample, or leave it out.",
            )

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of transformers' `generate`; no checkpoint default remains."""
        if not self.do_sample:
            return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        return {
            "do_sample": True,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_k": 0 if self.top_k is None else self.top_k,
            "top_p": 1.0 if self.top_p is None else self.top_p,
        }
