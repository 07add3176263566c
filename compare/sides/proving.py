"""Proving: what both sides hold is checked against its digests while it is judged; no verdict is told before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Concatenate, ParamSpec, TypeVar

from minimax_tools.capture.source import CaptureSource

P = ParamSpec("P")
R = TypeVar("R")
Judging = Callable[Concatenate[CaptureSource, CaptureSource, P], R]


def proved(judge: Judging[P, R]) -> Judging[P, R]:
    """Let a function that judges two captures return only once all that it read of them is proved.

    Args:
        judge: Takes the golden, the device run, and what else it needs.

    Raises:
        CaptureError: Something was damaged or changed, whatever the function came to.
    """

    @functools.wraps(judge)
    def run(reference: CaptureSource, target: CaptureSource, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as proofs:
            # The golden's is left last: where both are damaged, it is named.
            for side in (reference, target):
                proofs.enter_context(side.proving_beside())
            return judge(reference, target, *args, **kwargs)

    return run
