"""Following: from a prompt that differs to its golden, and from the golden to the first wrong pass and layer.

Both are commands of their own, run one after the other as child processes: `mm2-gpu full` makes the golden (extra
`golden`), `mm2-test model` runs and judges the port. Each can be repeated by hand.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.errors import CannotRunError, CaptureError
from minimax_tools.machine.whole_file import whole_file
from minimax_tools.results.followed import Followed
from minimax_tools.text.answered_prompts import AnsweredPrompt

_GOLDEN_PACKAGES = ("transformers", "accelerate")
_ROWS_FILE = "rows.json"
# Variables by which torchrun tells a process its place.
_RANK_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """The commands that lead from prompts to the layer; `directory` gets the golden and the port's capture."""

    directory: Path
    model: str
    port_options: tuple[str, ...]  # options of `mm2-test model` that name the port and its device
    padding_side: str
    golden: Path | None = None  # a golden that was given; None to make one of the prompts

    def follow(self, prompts: Sequence[AnsweredPrompt], *, as_json: bool) -> Followed:
        """Make the golden of some prompts, the first of which differs, and judge the port's passes and layers with it.

        Raises:
            CaptureError: The folder cannot be written.
        """
        commands = []
        if self.golden is None:
            commands.append(self._golden_command(prompts))
        num_decoded = min(len(prompts[0].answer_ids), *(len(prompt.row) - 1 for prompt in prompts))
        commands.append(self._model_command(num_decoded))
        lines = tuple(command.line for command in commands)
        if self.golden is None and not all(map(importlib.util.find_spec, _GOLDEN_PACKAGES)):
            return Followed(commands=lines, exit_code=None)
        for command in commands[:-1]:
            completed = command.run()
            if completed.returncode != 0:
                raise CannotRunError(
                    "the golden of the worst prompt could not be made",
                    found=(completed.stderr or completed.stdout).strip()[-400:],
                    next_step=f"Run it by hand: {command.line}",
                )
        completed = commands[-1].run(as_json=as_json)
        return Followed(
            commands=lines,
            exit_code=completed.returncode,
            text="" if as_json else completed.stdout,
            record=_read_record(completed.stdout) if as_json else None,
            errors=completed.stderr.strip()[-2000:] if completed.returncode not in (0, 1) else "",
        )

    def _golden_command(self, prompts: Sequence[AnsweredPrompt]) -> _Command:
        rows = self.directory / _ROWS_FILE
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with whole_file(rows) as file:
                json.dump([list(prompt.row) for prompt in prompts], file)
        except OSError as error:
            raise CaptureError(
                f"{rows} cannot be written", found=str(error), next_step="Choose another --output-dir."
            ) from error
        arguments = ["full", "--model", self.model, "--input-ids", str(rows), "--max-new-tokens", "1"]
        arguments += ["--padding-side", self.padding_side, "--output-dir", str(self.directory / "golden")]
        return _Command(program="mm2-gpu", module="gpu_reference", arguments=tuple(arguments))

    def _model_command(self, num_decoded: int) -> _Command:
        golden = self.golden or self.directory / "golden"
        arguments = ["model", "--model", self.model, "--golden", str(golden), *self.port_options]
        arguments += ["--decode", str(num_decoded), "--output-dir", str(self.directory / "port")]
        return _Command(program="mm2-test", module="neuron", arguments=tuple(arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    """A command of mm2."""

    program: str
    module: str
    arguments: tuple[str, ...]

    @property
    def line(self) -> str:
        """The command as typed in a shell."""
        return shlex.join((self.program, *self.arguments))

    def run(self, *, as_json: bool = False) -> subprocess.CompletedProcess[str]:
        """Run it in a process of its own, in which mm2 is found as in this one."""
        # Of several ranks this is the lead; the command launches its own.
        alone = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        return subprocess.run(
            [sys.executable, "-m", self.module, *self.arguments, *(["--json"] if as_json else []), "--quiet"],
            capture_output=True,
            text=True,
            check=False,
            env={**alone, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )


def _read_record(text: str) -> dict[str, object] | None:
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
