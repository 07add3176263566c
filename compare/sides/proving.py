"""Proving: what was read of both sides is checked against their digests, before any verdict is returned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Concatenate, ParamSpec, TypeVar

from minimax_tools.capture.source import CaptureSource

P = ParamSpec("P")
R = TypeVar("R")
# A function of the golden, the device run, and further arguments.
Judging = Callable[Concatenate[CaptureSource, CaptureSource, P], R]


def proved(judge: Judging[P, R]) -> Judging[P, R]:
    """Decorate a judge of two captures: it returns only when all that it read of them is checked.

    The check runs on a thread beside the judge.

    Raises:
        CaptureError: A capture was damaged or changed, even if the judge itself raised.
    """

    @functools.wraps(judge)
    def run(reference: CaptureSource, target: CaptureSource, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as proofs:
            # Entered first, the golden's check is left last: if both sides are damaged, the golden's error is raised.
            for side in (reference, target):
                proofs.enter_context(side.proving_beside())
            return judge(reference, target, *args, **kwargs)

    return run
