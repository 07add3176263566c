"""Planted whole ports, run and judged by `mm2-test model`: what it finds first, and whether that is the mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click.testing

from faults.model_ports import FirstPass, ModelPlant
from neuron.cli import main as mm2_test

_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGround:
    """A model and its golden, on which whole ports are judged."""

    name: str  # name in the table
    model: Path  # folder of the checkpoint
    golden: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCase:
    """A planted whole port, as it was judged."""

    plant: ModelPlant
    ground: str  # name of the model
    backend: str
    exit_code: int
    verdict: str  # empty if the port could not be run
    error: str = ""  # what was written to stderr, if the port could not be run
    # The first finding: its pass, layer, sites and named mistake
    number: int | None = None
    layer: int | None = None
    sites: tuple[str, ...] = ()
    mistake: str | None = None
    in_chunks: bool = False  # whether its pass is one of several tokens behind a cache

    @property
    def is_detected(self) -> bool:
        """True if the verdict is `fail`; of a mistake that no number shows, also if it warns."""
        return self.verdict == "fail" or (self.plant.first is FirstPass.NONE and self.verdict == "warn")

    @property
    def is_placed(self) -> bool:
        """True if the first finding is at the planted pass, layer and site."""
        is_at_layer = self.layer in self.plant.layers if self.plant.layers else self.layer is None
        return (
            self.is_detected
            and self._is_at_pass
            and is_at_layer
            and bool(set(self.sites) & set(self.plant.sites))
        )

    @property
    def is_named(self) -> bool:
        """True if the first finding has the mistake's name, or none if it must have none."""
        return (self.mistake or "") in self.plant.names

    @property
    def _is_at_pass(self) -> bool:
        if self.in_chunks or self.plant.first is FirstPass.CHUNKS:
            return self.in_chunks and self.plant.first is FirstPass.CHUNKS
        if self.plant.first is FirstPass.PREFILL:
            return self.number == 0
        if self.plant.first is FirstPass.DECODE:
            # A prefill may fill the cache wrongly, which its own numbers do not show.
            return "cache" in self.sites or (self.number or 0) > 0
        return True


def judge_model_port(plant: ModelPlant, ground: ModelGround, *, backend: str, directory: Path) -> ModelCase:
    """Run a whole port and judge it; its capture is written to `directory`."""
    arguments = [
        *("model", "--model", ground.model, "--golden", ground.golden, "--target", plant.target),
        *("--backend", backend, "--output-dir", directory, "--overwrite", "--json", "--quiet"),
    ]
    if plant.num_ranks > 1:
        exit_code, stdout, stderr = _run_apart([*map(str, arguments), "--tp-degree", str(plant.num_ranks)])
    else:
        runner = click.testing.CliRunner(env=plant.variables)
        result = runner.invoke(mm2_test, [str(argument) for argument in arguments])
        exit_code, stdout, stderr = result.exit_code, result.stdout, result.stderr
    record: dict[str, Any] = json.loads(stdout) if stdout.strip() else {}
    first: dict[str, Any] = next(iter(record.get("findings", ())), {})
    return ModelCase(
        plant=plant,
        ground=ground.name,
        backend=backend,
        exit_code=exit_code,
        verdict=record.get("verdict", ""),
        error="" if record else stderr.strip(),
        number=first.get("number"),
        layer=first.get("layer"),
        sites=tuple(first.get("sites", ())),
        mistake=first.get("mistake"),
        in_chunks=first.get("in_chunks", False),
    )


def _run_apart(arguments: list[str]) -> tuple[int, str, str]:
    """Run `mm2-test` as a process of its own, as ranks need it; return exit code, stdout and stderr."""
    found = subprocess.run(
        [sys.executable, "-m", "neuron", *arguments],
        cwd=_REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(_REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    return found.returncode, found.stdout, found.stderr
