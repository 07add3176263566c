"""Compiler: a backend of torch.compile that makes graphs of a layer, and counts of what it has compiled so far."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from minimax_tools.errors import TargetError, UsageError
from minimax_tools.text_enum import TextEnum
from neuron.devices.backend import Backend

if TYPE_CHECKING:
    from torch import nn


Counted = TypeVar("Counted")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreak:
    """A break of a graph that torch.compile makes of a layer: a line that runs outside of any graph."""

    reason: str
    place: str | None = None  # the line: its file, number and code; None if torch does not know it

    def __str__(self) -> str:
        return f"{self.place or 'an unknown line'}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCounts:
    """Counts since this process began, or between two such counts; all zero where nothing is compiled."""

    compiles: int  # graphs compiled
    fallbacks: Mapping[str, int]  # times that an operation ran on the CPU instead of the device, by its name
    seconds: float = 0.0  # time of compiling
    graph_breaks: Mapping[GraphBreak, int] = field(default_factory=dict)  # times that each break was met
    # Times that a graph was compiled anew, by the condition that the graphs before did not meet.
    recompiles: Mapping[str, int] = field(default_factory=dict)

    def since(self, earlier: CompileCounts) -> CompileCounts:
        """Subtract an earlier count."""
        return CompileCounts(
            compiles=self.compiles - earlier.compiles,
            fallbacks=_grown(self.fallbacks, earlier.fallbacks),
            seconds=self.seconds - earlier.seconds,
            graph_breaks=_grown(self.graph_breaks, earlier.graph_breaks),
            recompiles=_grown(self.recompiles, earlier.recompiles),
        )


def _grown(now: Mapping[Counted, int], earlier: Mapping[Counted, int]) -> dict[Counted, int]:
    """Return what was counted since, by what it is; without what was not."""
    grown = {key: count - earlier.get(key, 0) for key, count in now.items()}
    return {key: count for key, count in grown.items() if count}


# Values of --compile beside the compilers' names.
AUTO, OFF = "auto", "off"
# Far above the layers and shapes of any run. With torch's own limit of 8, a graph that is compiled for every layer
# would run uncompiled from the ninth layer on, with a log line alone.
_MOST_GRAPHS = 1 << 16
# Number of a frame and of its graph, such as `0/1: `.
_GRAPH_NUMBER = re.compile(r"^\d+/\d+: ")
# Settings of torch.compile with which nothing runs uncompiled in silence.
_STRICT: Mapping[str, Any] = MappingProxyType(
    {
        "recompile_limit": _MOST_GRAPHS,
        "accumulated_recompile_limit": _MOST_GRAPHS,
        "fail_on_recompile_limit_hit": True,
        "suppress_errors": False,
    }
)


class Compiler(TextEnum):
    """A backend of torch.compile; the values are torch's names."""

    NEURON = "neuron"  # TorchNeuron's: StableHLO, then neuronx-cc
    INDUCTOR = "inductor"  # torch's own: C++ on the CPU, which needs a C++ compiler
    AOT_EAGER = "aot_eager"  # the graph of aten operations, run as it is
    EAGER = "eager"  # the graph as it was captured, run as it is

    def compile(self, module: nn.Module, *, what: str) -> Callable[..., Any]:
        """Return a function that runs `module` in graphs, which are compiled at its first call, for fixed shapes.

        The function raises TargetError, which begins with `what`, if no graph can be made.
        """
        import torch

        # TorchNeuron refuses graphs of dynamic shapes, and a layer's shapes are fixed.
        options: dict[str, Any] = {"guard_filter_fn": _select_guards}
        compiled = torch.compile(module, backend=str(self), dynamic=False, options=options)

        def run(*arguments: object, **keywords: object) -> Any:
            import torch._dynamo.exc
            import torch._dynamo.utils

            # The reasons of the newest compiles are kept, 64 by default.
            torch._dynamo.utils.set_compilation_metrics_limit(_MOST_GRAPHS)
            try:
                with torch._dynamo.config.patch(**_STRICT):
                    return compiled(*arguments, **keywords)
            except torch._dynamo.exc.TorchDynamoException as error:
                raise TargetError(
                    f"{what} cannot be compiled by torch.compile for {self}",
                    found=_read_failure(error),
                    next_step=f"--compile {OFF} runs it operation by operation; see --debug for the traceback.",
                ) from error

        return run


def choose_compiler(name: str, backend: Backend) -> Compiler | None:
    """Return the compiler of a name on a backend; None for `off`. `auto` compiles on Neuron's native backend alone.

    Raises:
        UsageError: The backend makes graphs itself, or has no such compiler.
    """
    if name == AUTO:
        return Compiler.NEURON if backend is Backend.NEURON else None
    if name == OFF:
        return None
    compiler = Compiler(name)
    if backend.is_lazy:
        raise UsageError(
            f"--compile {compiler} does not go with the backend {backend}: it compiles graphs itself",
            next_step="Leave --compile out, or use --backend cpu or --backend neuron.",
        )
    # TorchNeuron lowers graphs to StableHLO; inductor makes no code for its device.
    other = Compiler.INDUCTOR if backend is Backend.NEURON else Compiler.NEURON
    if compiler is other:
        raise UsageError(
            f"--compile {compiler} makes no graphs for the backend {backend}",
            expected=f"one of {', '.join(str(one) for one in Compiler if one is not other)}, or {OFF}",
            found=str(compiler),
        )
    return compiler


def count_torch_compiles() -> CompileCounts:
    """Count what torch.compile did in this process so far, for mm2 or for a port that calls it; no fallbacks."""
    # A process that compiles nothing need not spend a second on the import.
    if "torch._dynamo.utils" not in sys.modules:
        return CompileCounts(compiles=0, fallbacks={})
    from torch._dynamo import utils

    return CompileCounts(
        compiles=utils.counters["stats"]["unique_graphs"],
        fallbacks={},
        seconds=utils.cumulative_time_spent_ns["entire_frame_compile"] / 1e9,
        graph_breaks=Counter(_read_break(found) for found in utils.graph_break_reasons),
        recompiles=Counter(
            _read_condition(compile_metrics.recompile_reason)
            for compile_metrics in utils.get_compilation_metrics()
            if compile_metrics.recompile_reason
        ),
    )


def _select_guards(guards: Iterable[Any]) -> list[bool]:
    """Decide for each condition of a graph whether it is checked before the graph is used.

    torch ignores which hooks a module has, but not which of them take keyword arguments: each hook has a number of its
    own there. So every layer's hooks would need a graph of their own.
    """
    return ["hooks_with_kwargs" not in guard.name for guard in guards]


def _read_break(found: Any) -> GraphBreak:
    """Read torch's record of a graph break: its text, and the Python frames from the layer to the line."""
    import torch

    reason = _first_line(found.reason)
    if not found.user_stack:
        return GraphBreak(reason=reason)
    # The innermost line of the port, or of what it imports: torch's own lines beneath it say little.
    of_torch = Path(torch.__file__).parent
    outside = [frame for frame in found.user_stack if of_torch not in Path(frame.filename).parents]
    frame = (outside or found.user_stack)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return GraphBreak(reason=reason, place=f"{place} `{frame.line}`" if frame.line else place)


def _read_condition(text: str) -> str:
    """Return the condition that kept torch from using a graph, in Python, with the line that it comes from.

    The text begins with the graph's number, and may end in advice on torch's own settings.
    """
    condition = _first_line(text).partition("(HINT:")[0]
    return " ".join(_GRAPH_NUMBER.sub("", condition).split())


def _read_failure(error: Exception) -> str:
    # A backend's own error: torch's text begins with the backend's name alone.
    error = getattr(error, "inner_exception", error)
    text = str(error)
    # Newer releases of torch give a title first, and the reason on a line of its own.
    _, _, explanation = text.partition("\n  Explanation: ")
    reason = ": ".join(_first_line(part) for part in (text, explanation) if part)
    return f"{type(error).__name__}: {reason}"


def _first_line(text: str) -> str:
    """Return the first line: the others advise on torch's own settings."""
    return text.strip().partition("\n")[0]
