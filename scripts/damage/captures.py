"""Captures of a right port: a golden and a device run, whose copies are damaged and then compared."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import click
import click.testing
import torch
from cpu_golden import write_model
from port_runs import EXAMPLES

from compare.cli import main as mm2_compare
from damage.damages import Damage
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.cli import main as mm2_test

# States of a golden before it is damaged: as written, and certified.
STATES = ("plain", "certified")

# This port equals the golden bit for bit: so in a chained run, too, each layer's input is the golden's.
_SAME_PORT = EXAMPLES / "transformers_port.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutcome:
    """Exit code of a command, and its output on both streams."""

    exit_code: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeCaptures:
    """The whole captures of a small model, in a folder; only copies are damaged."""

    folder: Path

    def golden(self, state: str, *, is_without_twins: bool = False) -> Path:
        """Return the golden's folder, with twins or the floor's statistics alone."""
        certified = "_certified" if state == "certified" else ""
        return self.folder / f"{'stats' if is_without_twins else 'golden'}{certified}"

    @property
    def device_run(self) -> Path:
        """Folder of a whole run of a right port, from the tokens to the logits."""
        return self.folder / "device"

    def judge(self, state: str, damage: Damage | None, scratch: Path) -> CommandOutcome:
        """Compare copies of golden and device run; `damage` changes one of them, None leaves both whole.

        The golden is in one of `STATES`. The copies lie in the folder `scratch`, which is emptied first.
        """
        shutil.rmtree(scratch, ignore_errors=True)
        is_without_twins = damage is not None and damage.is_without_twins
        golden = _copy(self.golden(state, is_without_twins=is_without_twins), scratch / "golden")
        device = _copy(self.device_run, scratch / "device")
        if damage is not None:
            damage.apply(golden if damage.is_of_golden else device)
        return _run(mm2_compare, "--golden", golden, "--run", device, "--quiet")

    def show(self, directory: Path) -> CommandOutcome:
        """Run `mm2-test show`."""
        return _run(mm2_test, "show", directory, "--quiet")


def make_captures(folder: Path) -> WholeCaptures:
    """Make the whole captures in a new folder.

    Raises:
        AssertionError: A command failed.
    """
    model = folder / "model"
    small = SyntheticModel(num_hidden_layers=2, hidden_size=128, num_local_experts=16, vocab_size=512)
    write_model(model, small, dtype=torch.bfloat16)
    quiet = ("--model", model, "--quiet")
    for name, floor in (("golden", "full"), ("stats", "stats")):
        options = ("--seq-len", "24,17", "--noise-floor", floor, "--output-dir", folder / name)
        _make(mm2_gpu, "extract-all", *quiet, *options)
        certified = _copy(folder / name, folder / f"{name}_certified")
        _make(mm2_gpu, "certify", *quiet, "--golden", certified)
    port = ("--target", f"{_SAME_PORT}:Same", "--backend", "cpu")
    _make(mm2_test, "full", *quiet, *port, "--golden", folder / "golden", "--output-dir", folder / "device")
    return WholeCaptures(folder=folder)


def _copy(source: Path, place: Path) -> Path:
    """Copy a folder; with links, the source would be damaged too."""
    return Path(shutil.copytree(source, place))


def _make(command: click.Command, *words: object) -> None:
    outcome = _run(command, *words)
    assert outcome.exit_code == 0, f"{' '.join(map(str, words))}: {outcome.text}"


def _run(command: click.Command, *words: object) -> CommandOutcome:
    result = click.testing.CliRunner().invoke(command, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return CommandOutcome(exit_code=result.exit_code, text=result.output)
