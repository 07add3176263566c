"""Proving: checks both sides against their digests while they are judged, before any verdict is returned."""

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
    """Let a judge of two captures return only when all that it read of them is checked.

    Args:
        judge: A function of the golden, the device run, and further arguments.

    Raises:
        CaptureError: A capture was damaged or changed, even if the judge itself raised.
    """

    @functools.wraps(judge)
    def run(reference: CaptureSource, target: CaptureSource, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as proofs:
            # The golden's is left last: where both are damaged, it is named.
            for side in (reference, target):
                proofs.enter_context(side.proving_beside())
            return judge(reference, target, *args, **kwargs)

    return run
