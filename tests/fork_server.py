"""ForkServer: runs Python programs in forks of one process, which has imported torch and the work of `mm2-test`.

Such a program starts in milliseconds. It has its own standard streams, folder, variables and paths of modules.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO


class ForkServer:
    """Starts the process with its first program, and ends it by `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._variables: dict[str, str] = {}

    def run(self, arguments: Sequence[str], **given: Any) -> subprocess.CompletedProcess[str]:
        """Run `python ARGUMENTS` to its end; `given` is what `started` takes."""
        with self.started(arguments, **given) as program:
            return program.wait()

    @contextmanager
    def started(
        self,
        arguments: Sequence[str],
        *,
        folder: Path,
        environment: dict[str, str],
        standard_input: str = "",
        modules: Sequence[str] = (),
        streams: Mapping[int, str] = MappingProxyType({}),
    ) -> Iterator[StartedProgram]:
        """Start `python ARGUMENTS`, which begin with `-c` or `-m`; at the end kill it unless it was waited for.

        Programs with the same `modules` are forks of a process that has them imported besides. The path of a terminal
        or a FIFO may take the place of a standard stream, whose number is its key.
        """
        self._start(environment)
        with tempfile.TemporaryDirectory() as place:
            files = [Path(place, name) for name in ("stdin", "stdout", "stderr")]
            for file, text in zip(files, (standard_input, "", ""), strict=True):
                file.write_text(text)
            pid = self.ask(
                modules=list(modules),
                arguments=list(arguments),
                folder=str(folder),
                environment=environment,
                files=[streams.get(number, str(file)) for number, file in enumerate(files)],
            )
            program = StartedProgram(self, pid, modules, arguments, *files[1:])
            try:
                yield program
            finally:
                program.kill()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()

    def ask(self, **request: object) -> int:
        """Send a request, as `_next_program` reads it, and return the answer."""
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
                env={**environment, "PYTHONPATH": str(Path(__file__).parents[1])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert variables == self._variables


class StartedProgram:
    """A program that runs while its test goes on."""

    def __init__(
        self,
        server: ForkServer,
        pid: int,
        modules: Sequence[str],
        arguments: Sequence[str],
        stdout: Path,
        stderr: Path,
    ) -> None:
        self.pid = pid
        self._server, self._modules, self._arguments = server, list(modules), list(arguments)
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
        exit_code = self._server.ask(modules=self._modules, wait_for=self.pid)
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

    import compare
    import gpu_reference
    import minimax_tools
    import neuron
    import reports

    # Commands import what they work with when they run.
    for package in (minimax_tools, reports, compare, gpu_reference, neuron):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(".__main__"):
                importlib.import_module(module.name)
    _keep_for_good()


def _keep_for_good() -> None:
    """Spare what lives now the collections of garbage, which would copy its memory in each fork."""
    gc.collect()
    gc.freeze()


def _next_program(given: TextIO, told: TextIO, held: tuple[str, ...] = ()) -> dict[str, Any]:
    """Fork for each program that is asked for. The forks return it; the server returns never.

    It answers with the program's process, and to `wait_for` such a process with its exit code. For programs that want
    other modules than those `held`, a fork that imports them becomes a server of its own.
    """
    servers: dict[tuple[str, ...], tuple[TextIO, TextIO]] = {}
    for line in given:
        request: dict[str, Any] = json.loads(line)
        modules = tuple(request["modules"])
        if modules != held:
            if modules not in servers:
                (asked, ask), (answered, reply) = os.pipe(), os.pipe()
                if os.fork() == 0:
                    os.close(ask)
                    _import_besides(modules)
                    return _next_program(os.fdopen(asked), os.fdopen(reply, "w"), modules)
                os.close(asked)
                os.close(reply)
                servers[modules] = (os.fdopen(ask, "w"), os.fdopen(answered))
            requests, answers = servers[modules]
            requests.write(line)
            requests.flush()
            answer = int(answers.readline())
        elif "wait_for" in request:
            _, status = os.waitpid(request["wait_for"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                return request
        told.write(f"{answer}\n")
        told.flush()
    sys.exit()


def _import_besides(modules: Sequence[str]) -> None:
    # As mm2 imports transformers.
    os.environ["USE_TORCH_XLA"] = "0"
    for name in modules:
        importlib.import_module(name)
    _keep_for_good()


def _take_place(program: dict[str, Any], own_path: str) -> None:
    """Take a program's folder, variables, streams and paths of modules, as a new Python would."""
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    for number, file in enumerate(program["files"]):
        descriptor = os.open(file, os.O_RDWR | os.O_NOCTTY)
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
    program = _next_program(sys.stdin, sys.stdout)
    _take_place(program, own_path)
    kind, given, *rest = program["arguments"]
    sys.argv = [kind, *rest]
    if kind == "-m":
        runpy.run_module(given, run_name="__main__", alter_sys=True)
    else:
        exec(compile(given, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    _serve()
