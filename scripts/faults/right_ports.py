"""Right ports: every implementation that must pass, as runs of a stage.

mm2's own layers, the plain ones of scripts/examples and the port that mistakes are planted in, on every backend;
transformers' own layer in all of its implementations; and mm2's layer divided among ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from clean_ports import EXAMPLES, clean_ports

from faults.runs import RANKS, PlannedRun
from faults.scene import Stage

_PLAIN = ("planted", f"{EXAMPLES / 'port.py'}:DecoderLayer", f"{EXAMPLES / 'minimal_port.py'}:DecoderLayer")
# Compiled on the CPU anew for each length, half a minute at a time.
_FLEX = f"{EXAMPLES / 'transformers_port.py'}:FlexAttention"


def plan_right_ports(
    stage: Stage, *, backends: tuple[str, ...], ranks: tuple[int, ...] = (), with_flex: bool = False
) -> Iterator[PlannedRun]:
    """Plan all right ports on a stage, a backend at a time.

    Args:
        stage: The stage.
        backends: Where they run; transformers' layer runs on `cpu` alone.
        ranks: By how many ranks mm2's layer is shared as well.
        with_flex: Whether transformers' layer runs with flex attention too.
    """
    ports = clean_ports(backends, tp_degrees=ranks)
    for backend in backends:
        names = [
            f"{RANKS}{port.tp_degree}" if port.tp_degree > 1 else port.target
            for port in ports
            if port.backend == backend
        ]
        names += _PLAIN
        names += [_FLEX] if with_flex and backend == "cpu" else []
        for name in names:
            yield PlannedRun(stage=stage, port=name, backend=backend)
