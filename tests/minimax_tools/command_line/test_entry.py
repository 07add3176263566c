"""A command begun as a process: signals and odd streams, from its first moment on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 120
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
STOPS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

# The command's file and its library tell when they are being loaded, and take long if asked to; so does the work.
PROGRAM = """
import sys
from minimax_tools.command_line.group import run_command
run_command("mm2-compare", "slow_command")
"""
SLOW_COMMAND = """
import time
from pathlib import Path
import click
from minimax_tools.command_line.console import Mm2Command, loading
if {is_slow}:
    Path("loading").touch()
    time.sleep(600)

@click.command(cls=Mm2Command, resumes=True)
@click.option("--json", is_flag=True)
def main(json):
    with loading():
        from slow_work import work
    work(json)
"""
SLOW_WORK = """
import time
from pathlib import Path
if {is_slow}:
    Path("loading").touch()
    time.sleep(600)

def work(json):
    try:
        Path("running").touch()
        time.sleep(600)
    finally:
        Path("cleaned").touch()
"""


def hear_stops() -> None:
    """Hear all stops: tests in the background of a shell, or under nohup, are left with some ignored."""
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)


def run(
    folder: Path, words: Sequence[str], *, before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command line in a folder; `before` is called in its process first."""
    return subprocess.run(
        words,
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        preexec_fn=before,
    )


def begin(folder: Path, *, slow: str) -> subprocess.Popen[str]:
    """The command begun, as far as its slow part: the loading of `command` or of `work`, or the `run`."""
    (folder / "slow_command.py").write_text(SLOW_COMMAND.format(is_slow=slow == "command"))
    (folder / "slow_work.py").write_text(SLOW_WORK.format(is_slow=slow == "work"))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--json"],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_stops,
    )
    mark, deadline = folder / ("running" if slow == "run" else "loading"), time.monotonic() + DEADLINE_S
    while not mark.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


AGAIN = "Run it again with"
ON = "What was finished is kept; go on with"


@pytest.mark.parametrize(
    ("slow", "sent", "next_step"),
    [
        *(("command", sent, AGAIN) for sent in STOPS),
        ("work", signal.SIGTERM, AGAIN),
        *(("run", sent, ON) for sent in STOPS),
    ],
)
def test_a_stop_is_told_in_words_that_name_the_command_to_go_on_with(
    tmp_path: Path, slow: str, sent: int, next_step: str
) -> None:
    process = begin(tmp_path, slow=slow)
    process.send_signal(sent)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3
    assert stderr == f"Error: interrupted. {next_step}: mm2-compare --json\n"
    if slow == "run":
        assert (tmp_path / "cleaned").exists()
    else:
        assert json.loads(stdout)["next"] == ["mm2-compare --json"]


@pytest.mark.parametrize("sent", STOPS)
def test_a_stop_in_text_that_is_executed_keeps_the_exit_code(tmp_path: Path, sent: int) -> None:
    # As dataclasses are made while a library is imported. After -m, Python looks at its end for such stops.
    (tmp_path / "program.py").write_text(PROGRAM.replace("slow_command", "executed"))
    (tmp_path / "executed.py").write_text(
        "import click\nfrom minimax_tools.command_line.console import Mm2Command\n"
        "@click.command(cls=Mm2Command)\ndef main():\n"
        f"    exec('import os, time; os.kill(os.getpid(), {int(sent)}); time.sleep(600)')\n"
    )
    done = run(tmp_path, [sys.executable, "-m", "program"], before=hear_stops)
    assert done.returncode == 3, done.stderr
    assert done.stderr == "Error: interrupted. Run it again with: mm2-compare\n"


def test_a_hangup_that_was_ignored_stays_ignored(tmp_path: Path) -> None:
    # As nohup does it.
    program = (
        f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); {PROGRAM.strip().splitlines()[1]}\n"
    )
    (tmp_path / "quick.py").write_text(
        "import os, signal, click\n@click.command()\ndef main():\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n    print('survived')\n"
    )
    done = run(tmp_path, [sys.executable, "-c", program + 'run_command("mm2-compare", "quick")'])
    assert done.stdout == "survived\n", done.stderr


@pytest.mark.parametrize("sent", STOPS)
def test_a_stop_at_the_very_end_does_not_replace_the_exit_code(tmp_path: Path, sent: int) -> None:
    (tmp_path / "quick.py").write_text(
        "import os, click\n"
        "class Last:\n"
        "    def __del__(self, kill=os.kill, me=os.getpid()):\n"
        f"        kill(me, {int(sent)})\n"
        "last = Last()\n"
        "@click.command()\ndef main():\n    raise SystemExit(1)\n"
    )
    done = run(tmp_path, [sys.executable, "-c", PROGRAM.replace("slow_command", "quick")], before=hear_stops)
    assert done.returncode == 1, done.stderr


def shell(folder: Path, words: str, redirection: str) -> subprocess.CompletedProcess[str]:
    return run(folder, ["sh", "-c", f"{sys.executable} -m {words} {redirection}"])


@pytest.mark.parametrize("words", ["compare --criteria-template", "neuron --help"])
@pytest.mark.parametrize(
    ("redirection", "found"),
    [(">&-", "standard output is closed"), (">/dev/full", "found No space left on device")],
)
def test_output_that_cannot_be_written_is_an_error_and_no_traceback(
    tmp_path: Path, words: str, redirection: str, found: str
) -> None:
    done = shell(tmp_path, words, redirection)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: standard output ")
    assert found in line


def test_an_error_is_told_although_its_json_cannot_be_written(forked_python: Any) -> None:
    program = "from compare.__main__ import main; main()"
    words = ("--golden", "absent", "--run", "absent", "--json")
    done = forked_python(program, *words, streams={1: "/dev/full"})
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: there is no capture directory absent")


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "<&-"])
def test_other_streams_may_be_closed_or_full(tmp_path: Path, redirection: str) -> None:
    done = shell(tmp_path, "compare --criteria-template", redirection)
    assert done.returncode == 0
    assert done.stdout.startswith("# mm2's limits")
