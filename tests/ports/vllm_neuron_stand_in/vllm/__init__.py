"""Stand-in for vLLM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SamplingParams:
    """The sampling of a request."""

    temperature: float = 1.0
    max_tokens: int = 16
    logprobs: int | None = None
