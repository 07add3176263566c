"""Commands whose standard streams are closed or full."""

from __future__ import annotations

from pathlib import Path

from torture.commands import make_commands
from torture.tally import Tally

# Redirections after which a command must tell that its result is lost, and those that it survives.
_LOST = (">&-", ">/dev/full", ">&- 2>/dev/null", ">/dev/full <&-")
_SURVIVED = ("2>&-", "2>/dev/full", "<&-", "<&- 2>&-", ">/dev/null")


def run_streams(scratch: Path, _: int) -> Tally:
    """Run every command with every redirection, as text and as JSON where it has both."""
    tally = Tally(promise="closed and full streams end in one line of words, or change nothing")
    for command in make_commands(scratch):
        name = f"{command.program} {command.words[0]}"
        usual_code = command.run(scratch).returncode
        for redirection in _SURVIVED:
            done = command.run(scratch, redirection)
            tally.check(
                done.returncode == usual_code, f"{name} {redirection}: {done.returncode}, {done.stderr}"
            )
        for redirection in _LOST:
            done = command.run(scratch, redirection)
            errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
            tells = errors and all("standard output" in line for line in errors)
            is_mute = "2>" in redirection
            tally.check(
                done.returncode == 3 and (is_mute or bool(tells)) and "Traceback" not in done.stderr,
                f"{name} {redirection}: {done.returncode}, {done.stderr[-300:]}",
            )
    return tally
