"""Following: from a prompt that differs to its golden, and from the golden to the first wrong pass and layer.

Both are commands of their own, run one after the other as child processes: `mm2-gpu full` makes the golden (extra
`golden`), `mm2-test model` runs and judges the port. Each can be repeated by hand.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimax_tools.errors import CannotRunError, CaptureError
from minimax_tools.machine.files import whole_file
from minimax_tools.machine.json_file import parse_json
from minimax_tools.machine.stops import run_child
from minimax_tools.results.prompt_results import Followed
from minimax_tools.results.results import Verdict
from minimax_tools.text.answered_prompts import AnsweredPrompt

_GOLDEN_PACKAGES = ("transformers", "accelerate")
_ROWS_FILE, _REPORT_FILE = "rows.json", "report.json"
# Characters at the end of a failed command's output that an error quotes.
_MOST_ERRORS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """The commands that lead from prompts to the layer; `directory` gets the golden and the port's capture."""

    directory: Path
    model: str
    port_options: tuple[str, ...]  # options of `mm2-test model` that name the port and its device
    padding_side: str
    buckets: tuple[int, ...] = ()  # lengths that rows are padded to
    golden: Path | None = None  # a golden that was given; None to make one of the prompts

    def follow(self, prompts: Sequence[AnsweredPrompt]) -> Followed:
        """Make the golden of some prompts, the first of which differs, and judge the port with it."""
        commands = []
        if self.golden is None:
            commands.append(self._golden_command(prompts))
        num_decoded = min(len(prompts[0].answer_ids), *(len(prompt.row) - 1 for prompt in prompts))
        commands.append(self._model_command(num_decoded))
        lines = tuple(map(shlex.join, commands))
        if self.golden is None and not all(map(importlib.util.find_spec, _GOLDEN_PACKAGES)):
            return Followed(commands=lines, exit_code=None)
        for command, line in zip(commands[:-1], lines, strict=False):
            completed = run_child((*command, "--quiet"))
            if completed.returncode != 0:
                raise CannotRunError(
                    "the golden of the worst prompt could not be made",
                    found=(completed.stderr or completed.stdout).strip()[-_MOST_ERRORS:],
                    next_step=f"Run it by hand: {line}",
                )
        completed = run_child((*commands[-1], "--json", "--quiet"))
        self._write(_REPORT_FILE, completed.stdout)
        could_judge = completed.returncode in (Verdict.PASS.exit_code, Verdict.FAIL.exit_code)
        return Followed(
            commands=lines,
            exit_code=completed.returncode,
            record=_read_record(completed.stdout),
            report_file=str(self.directory / _REPORT_FILE),
            errors="" if could_judge else completed.stderr.strip()[-_MOST_ERRORS:],
        )

    def _golden_command(self, prompts: Sequence[AnsweredPrompt]) -> tuple[str, ...]:
        rows = self._write(_ROWS_FILE, json.dumps([list(prompt.row) for prompt in prompts]))
        words = ["mm2-gpu", "full", "--model", self.model, "--input-ids", str(rows), "--max-new-tokens", "1"]
        words += ["--padding-side", self.padding_side, "--output-dir", str(self.directory / "golden")]
        longest = max(len(prompt.row) for prompt in prompts)
        fitting = [bucket for bucket in self.buckets if bucket >= longest]
        if fitting:
            words += ["--pad-to", str(min(fitting))]
        return tuple(words)

    def _model_command(self, num_decoded: int) -> tuple[str, ...]:
        golden = self.golden or self.directory / "golden"
        words = ["mm2-test", "model", "--model", self.model, "--golden", str(golden), *self.port_options]
        words += ["--decode", str(num_decoded), "--output-dir", str(self.directory / "port")]
        return tuple(words)

    def _write(self, name: str, text: str) -> Path:
        path = self.directory / name
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as file:
                file.write(text)
        except OSError as error:
            raise CaptureError(
                f"{path} cannot be written", found=str(error), next_step="Choose another --output-dir."
            ) from error
        return path


def _read_record(text: str) -> dict[str, Any] | None:
    try:
        record = parse_json(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
