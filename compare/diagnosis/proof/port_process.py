"""PortProcess: proofs in a process of `mm2-test`, which runs the port of a capture again, a layer at a time.

`compare` knows nothing of ports: it starts the command, and reads what this prints.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from compare.diagnosis.proof.proof import MistakeProof, not_provable
from compare.diagnosis.proof.undo import Undo
from minimax_tools.capture.manifest import Description
from minimax_tools.capture.source import CaptureSource
from minimax_tools.json_codec import decode
from minimax_tools.machine.json_file import parse_json

_MODULE = "neuron"  # the package of `mm2-test`


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """The key of the command's JSON that holds its proof."""

    proof: MistakeProof


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """The key of the JSON of a command that could not run that holds the reason."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PortProcess:
    """The port of a run, to be run again as it was: on the same backend, with as many ranks, from the same golden."""

    golden: str  # folder of the golden
    model: str  # folder or hub id of the checkpoint
    target: str  # the port, as --target names it
    run: Description  # description of the run that was diagnosed

    @classmethod
    def of(
        cls, golden: CaptureSource, run: CaptureSource, *, model: str, target: str | None
    ) -> PortProcess | None:
        """Return the process of a run's port; None if the run is another tool's dump, which names no port.

        `target` names the port if it lies elsewhere than the run says; None to take the run's.
        """
        description = run.known_description
        if description is None:
            return None
        return cls(
            golden=str(golden.directory),
            model=model,
            target=target or description.provenance.target,
            run=description,
        )

    def prove(self, layer: int, undone: tuple[Undo, ...]) -> MistakeProof:
        """Undo mistakes in a layer, and judge it again; a port that does not run proves nothing."""
        with tempfile.TemporaryDirectory(prefix="mm2-proof-") as folder:
            done = subprocess.run(
                [sys.executable, "-m", _MODULE, *self._arguments(layer, undone, folder)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        try:
            return decode(_Report, parse_json(done.stdout)).proof
        except ValueError:
            return not_provable(f"the port did not run: {_find_error(done)}", "Give its place with --target.")

    def _arguments(self, layer: int, undone: tuple[Undo, ...], folder: str) -> Iterator[str]:
        provenance = self.run.provenance
        yield from ("single-layer", "--layer", str(layer), "--model", self.model, "--golden", self.golden)
        yield from ("--target", self.target, "--backend", provenance.backend)
        yield from ("--dtype", provenance.dtypes["weights"], "--output-dir", folder, "--json", "--quiet")
        # A run on the native backend compiles unless told not to.
        yield from ("--compile", str(provenance.options.get("compile", "off")))
        for option in ("tp_degree", "ep_degree", "reduce_dtype"):
            if option in provenance.options:
                yield from (f"--{option.replace('_', '-')}", str(provenance.options[option]))
        for undo in undone:
            yield from ("--undo", str(undo))


def _find_error(done: subprocess.CompletedProcess[str]) -> str:
    """Return the message of a command that failed."""
    try:
        return decode(_Failure, parse_json(done.stdout)).error.rstrip(".")
    except ValueError:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"it ended with exit code {done.returncode}"
