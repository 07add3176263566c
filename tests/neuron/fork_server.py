"""ForkServer: runs Python programs in forks of one process, which has imported torch and the work of `mm2-test`.

Such a program starts in milliseconds. It has its own standard streams, folder, variables and paths of modules.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class ForkServer:
    """Starts the process with its first program, and ends it by `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._variables: dict[str, str] = {}

    def run(
        self, arguments: Sequence[str], *, folder: Path, environment: dict[str, str], standard_input: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `python ARGUMENTS`, which begin with `-c` or `-m`."""
        with self.started(
            arguments, folder=folder, environment=environment, standard_input=standard_input
        ) as program:
            return program.wait()

    @contextmanager
    def started(
        self,
        arguments: Sequence[str],
        *,
        folder: Path,
        environment: dict[str, str],
        standard_input: str = "",
    ) -> Iterator[StartedProgram]:
        """Start `python ARGUMENTS`; the program is killed at the end unless it was waited for."""
        self._start(environment)
        with tempfile.TemporaryDirectory() as streams:
            files = [Path(streams, name) for name in ("stdin", "stdout", "stderr")]
            for file, text in zip(files, (standard_input, "", ""), strict=True):
                file.write_text(text)
            pid = self._ask(
                arguments=list(arguments),
                folder=str(folder),
                environment=environment,
                files=[str(file) for file in files],
            )
            program = StartedProgram(self, pid, arguments, *files[1:])
            try:
                yield program
            finally:
                program.kill()

    def wait_for(self, pid: int) -> int:
        """Wait for the end of a program, and return its exit code."""
        return self._ask(wait_for=pid)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()

    def _ask(self, **request: object) -> int:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def _start(self, environment: dict[str, str]) -> None:
        # torch reads the number of threads once, when it is imported.
        variables = {"OMP_NUM_THREADS": environment["OMP_NUM_THREADS"]}
        if self._process is None:
            self._variables = variables
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert variables == self._variables


class StartedProgram:
    """A program that runs while its test goes on."""

    def __init__(
        self, server: ForkServer, pid: int, arguments: Sequence[str], stdout: Path, stderr: Path
    ) -> None:
        self.pid = pid
        self._server, self._arguments = server, list(arguments)
        self._stdout, self._stderr = stdout, stderr
        self._was_waited_for = False

    def has_ended(self) -> bool:
        """Decide whether it has ended."""
        # Its server keeps it as a zombie until it is waited for.
        state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z"

    def wait(self, *, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
        """Wait for its end, or fail."""
        if timeout_s is not None:
            deadline = time.monotonic() + timeout_s
            while not self.has_ended():
                assert time.monotonic() < deadline, f"the program did not end within {timeout_s} s"
                time.sleep(0.02)
        exit_code = self._server.wait_for(self.pid)
        self._was_waited_for = True
        return subprocess.CompletedProcess(
            self._arguments, exit_code, self._stdout.read_text(), self._stderr.read_text()
        )

    def kill(self) -> None:
        """End it unless it was waited for."""
        if not self._was_waited_for:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


def _import_work() -> None:
    """Import what the commands need, except what they import where they use it."""
    import numba  # noqa: F401  # the compiled loops
    import torch._dynamo  # noqa: F401  # layers that are compiled or traced

    from minimax_tools.command_line.work import work_of
    from neuron.cli import main

    for command in main.commands.values():
        for work in work_of(command):
            work.load()
    gc.collect()
    gc.freeze()


def _next_program() -> dict[str, Any]:
    """Fork for each program that is asked for. The forks return it; the server returns never.

    It answers with the program's process, and to `wait_for` such a process with its exit code.
    """
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "wait_for" in request:
            _, status = os.waitpid(request["wait_for"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                return request
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
    sys.exit()


def _take_place(program: dict[str, Any], own_path: str) -> None:
    """Take a program's folder, variables, streams and paths of modules, as a new Python would."""
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    for number, file in enumerate(program["files"]):
        descriptor = os.open(file, os.O_RDWR)
        os.dup2(descriptor, number)
        os.close(descriptor)
    # As in a program that nobody started in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Without what the server has read ahead.
    sys.stdin = os.fdopen(0, closefd=False)
    path = os.environ["PYTHONPATH"]
    # The folder of this file, and the server's own paths.
    sys.path[: 1 + len(own_path.split(os.pathsep))] = ["", *path.split(os.pathsep)]
    if path != own_path:
        sys.modules.pop("sitecustomize", None)
        site.execsitecustomize()


def _serve() -> None:
    own_path = os.environ["PYTHONPATH"]
    _import_work()
    program = _next_program()
    _take_place(program, own_path)
    kind, given, *rest = program["arguments"]
    sys.argv = [kind, *rest]
    if kind == "-m":
        runpy.run_module(given, run_name="__main__", alter_sys=True)
    else:
        exec(compile(given, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    _serve()
