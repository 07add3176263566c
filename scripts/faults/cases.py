"""Cases: one layer of one run as it was judged, and the journal that keeps what has run."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
# They say what is to run, which the journal keeps in whole, and count and print what was judged.
_COUNT = ("plan.py", "tally.py", "table.py")
_SOURCES = ("compare", "minimax_tools", "neuron", "gpu_reference", "scripts/faults")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layer of one run.

    Args:
        run: What ran: stage, port, backend and rows, in words.
        stage: The scene's name.
        port: The port in words.
        backend: Where it ran.
        rows: `prefill`, or `decode` where some rows were decoded.
        layer: The layer.
        kind: `catalogued`, `uncatalogued`, `pair`, `equivalent`, or `right` where nothing was planted in this layer.
        mistake: The plant's name; empty where there is none.
        parameters: Its parameters.
        sites: Where it lives.
        halves: Of a pair, where each of its mistakes lives.
        effects: At each site, what it changes in float32 over the noise floor.
        failed: Sites that mm2 fails.
        warned: Sites that it warns of.
        blamed: The sets of sites that it blames.
        reason: Why.
        black_box_detected: Whether it fails the layer by its output alone.
        rivals: The sites that each other rule calls different.
        named: What the diagnosis says of the output alone, best first, as `[name, parameters]`; None where it was
            not asked.
    """

    run: str
    stage: str
    port: str
    backend: str
    rows: str
    layer: int
    kind: str
    mistake: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    sites: tuple[str, ...] = ()
    halves: tuple[tuple[str, ...], ...] = ()
    effects: Mapping[str, float] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()
    blamed: tuple[tuple[str, ...], ...] = ()
    reason: str = ""
    black_box_detected: bool = False
    rivals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    named: tuple[tuple[str, Mapping[str, Any]], ...] | None = None

    @property
    def is_mistake(self) -> bool:
        """Whether the layer is wrong."""
        return self.kind in ("catalogued", "uncatalogued")

    @property
    def is_right(self) -> bool:
        """Whether nothing in it is wrong."""
        return self.kind in ("right", "equivalent")

    @property
    def effect(self) -> float:
        """The largest effect at the sites where it lives."""
        return max((self.effects.get(site, 0.0) for site in self.sites), default=0.0)

    @property
    def is_above_floor(self) -> bool:
        """Whether it changes more than BF16 costs, where it lives."""
        return self.is_mistake and self.effect >= 1.0

    @property
    def is_distinguishable(self) -> bool:
        """Whether the layer's output changes by more than BF16 costs it."""
        return self.is_mistake and self.effects.get("output", 0.0) >= 1.0

    @property
    def is_pair_above_floor(self) -> bool:
        """Whether each of two mistakes changes more than BF16 costs, where it lives."""
        return bool(self.halves) and all(
            max(self.effects.get(site, 0.0) for site in sites) >= 1.0 for sites in self.halves
        )

    @property
    def is_pair_named(self) -> bool:
        """Whether both of two mistakes are blamed where they live, and nothing else is."""
        named = {site for sites in self.blamed for site in sites}
        return self.is_site_named and all(named & set(sites) for sites in self.halves)

    @property
    def is_detected(self) -> bool:
        """Whether mm2 fails the layer."""
        return bool(self.failed or self.blamed)

    @property
    def is_site_named(self) -> bool:
        """Whether what is blamed is where it lives, and nothing else."""
        named = {site for sites in self.blamed for site in sites}
        return bool(named) and named <= set(self.sites)

    @property
    def is_named(self) -> bool:
        """Whether the diagnosis names the mistake, be it among others that explain the output as well."""
        return any(name == self.mistake for name, _ in self.named or ())

    @property
    def is_named_first(self) -> bool:
        """Whether it names the mistake before all others."""
        return bool(self.named) and self.named is not None and self.named[0][0] == self.mistake

    def __str__(self) -> str:
        parameters = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        what = f"{self.mistake}({parameters})" if parameters else self.mistake or self.port
        return f"{what}, {self.stage}, layer {self.layer}, {self.rows}, {self.backend}"


class Journal:
    """A file of finished runs, one a line; what other code judged is not gone on with.

    Args:
        path: The file; None to keep nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._runs: dict[str, tuple[Case, ...]] = {}
        sources = digest_sources()
        if path is None:
            return
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        if lines and _parsed(lines[0]) == {"sources": sources}:
            for record in map(_parsed, lines[1:]):
                if record is not None:
                    self._runs[record["run"]] = tuple(_case(case) for case in record["cases"])
        else:
            path.write_text(json.dumps({"sources": sources}) + "\n", encoding="utf-8")

    def find(self, run: str) -> tuple[Case, ...] | None:
        """The cases of a run that has finished; None where it has not."""
        return self._runs.get(run)

    def add(self, run: str, cases: Iterable[Case]) -> None:
        """Keep a finished run."""
        self._runs[run] = tuple(cases)
        if self._path is not None:
            line = json.dumps({"run": run, "cases": [asdict(case) for case in self._runs[run]]})
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def __len__(self) -> int:
        return len(self._runs)


def digest_sources() -> str:
    """sha256 over the code that runs and judges, and the limits that it judges by."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((_ROOT / folder).rglob("*.*")):
            if path.suffix in (".py", ".yaml") and path.name not in _COUNT:
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _parsed(line: str) -> Any:
    """A line's record; None for the last one of a run that was killed while it wrote."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _case(record: dict[str, Any]) -> Case:
    named = record["named"]
    return Case(
        **{
            **record,
            "sites": tuple(record["sites"]),
            "halves": tuple(tuple(sites) for sites in record["halves"]),
            "failed": tuple(record["failed"]),
            "warned": tuple(record["warned"]),
            "blamed": tuple(tuple(sites) for sites in record["blamed"]),
            "rivals": {name: tuple(sites) for name, sites in record["rivals"].items()},
            "effects": {
                site: math.inf if effect is None else effect for site, effect in record["effects"].items()
            },
            "named": None if named is None else tuple((name, given) for name, given in named),
        }
    )
