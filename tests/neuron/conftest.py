"""Ports written for one test, the toy in other dtypes, and commands in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch
from safetensors.torch import load_file

from minimax_tools.errors import install_command
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.cli import main as mm2_test

Result = click.testing.Result
Run = Callable[..., Result]
Process = Callable[..., "subprocess.CompletedProcess[str]"]
WritePort = Callable[..., str]
MakeGolden = Callable[..., Path]
MakeModel = Callable[[SyntheticModel, torch.dtype], Path]
Environment = Callable[..., dict[str, str]]

SHORT = ("--seq-len", "12,7", "--json")
# A model smaller than the toy: 4 layers.
SMALL = SyntheticModel(
    hidden_size=64, num_local_experts=8, num_experts_per_tok=2, intermediate_size=64, vocab_size=512
)

_PORT_IMPORTS = """
import os
import torch
from torch import nn
from minimax_tools.reference.layer import ReferenceAttention, ReferenceLayer, ReferenceMoe, ReferenceRouter
"""

# Fails, or waits to be killed, at the layer that a variable names: the source stays the same.
_STUMBLING_PORT = """
import time

class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx

    def forward(self, *arguments):
        if os.environ.get("FAIL_AT") == str(self.layer_idx):
            raise RuntimeError("out of luck")
        if os.environ.get("HANG_AT") == str(self.layer_idx):
            open(os.environ["HANGS"], "w").close()
            time.sleep(600)
        return super().forward(*arguments)
"""

# The device layer with its experts in other chunks than its own choice.
_CHUNKED_PORT = """
from neuron.builtin.layer import DeviceLayer

class Port(DeviceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx, chunk_size_bytes={size_bytes})
        assert len(self.block_sparse_moe.experts) == {num_chunks}
"""
# An expert of the small model in FP8 is 3 · 64 · 32 weights, in BF16 when it runs.
_EXPERT_BYTES = 3 * 64 * 32 * 2

# Runs several commands in one process: torch_xla takes seconds to import, and counts graphs per process.
_SERVE = """
import json, sys
import click.testing
from neuron.cli import main
results = []
for arguments in json.loads(sys.stdin.read()):
    result = click.testing.CliRunner().invoke(main, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    results.append({"exit_code": result.exit_code, "stdout": result.stdout, "stderr": result.stderr})
print(json.dumps(results))
"""

# Runs `mm2-test` as several ranks, as torchrun starts them; the exit code is that of rank 0.
_RANKS = """
import os, runpy, sys
from torch.distributed import TCPStore
num_ranks, writers, ranks = int(sys.argv[1]), [], []
for rank in range(num_ranks):
    reader, writer = os.pipe()
    ranks.append(os.fork())
    if ranks[-1] == 0:
        os.close(writer)
        variables = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.read(reader, 8).decode(),
            "TORCHELASTIC_RUN_ID": "ranks", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        os.environ.update({name: str(value) for name, value in variables.items()})
        sys.argv = ["mm2-test", *sys.argv[2:]]
        runpy.run_module("neuron", run_name="__main__", alter_sys=True)
    os.close(reader)
    writers.append(writer)
# Only now: its threads would not be in the forks.
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
for writer in writers:
    os.write(writer, str(store.port).encode())
codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
sys.exit(codes[0])
"""


@pytest.fixture
def run(command: Callable[..., Result], tmp_path: Path) -> Run:
    """Runs `mm2-test` in this process; captures go below the test's folder unless it says otherwise."""

    def run_here(*arguments: object) -> Result:
        return command(mm2_test, *arguments, "--captures", tmp_path / "captures")

    return run_here


@pytest.fixture
def process(tmp_path: Path, environment_of: Environment) -> Process:
    """Runs `mm2-test` in a process of its own, in the test's folder."""

    def run_there(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return _run_process(
            "-m", "neuron", *arguments, folder=tmp_path, environment=environment_of(**environment)
        )

    return run_there


@pytest.fixture(scope="session")
def run_python(tmp_path_factory: pytest.TempPathFactory, environment_of: Environment) -> Process:
    """Runs Python code in a process of its own; what lies in `folder` can be imported."""

    def run_code(
        code: str, *, folder: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        folder = tmp_path_factory.mktemp("python") if folder is None else folder
        return _run_process("-c", code, folder=folder, environment=environment_of(**environment))

    return run_code


@pytest.fixture
def torchrun(tmp_path: Path, environment_of: Environment) -> Process:
    """Runs a Python file, or a module with its arguments, as two ranks of torchrun, in the test's folder."""

    def run_ranks(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
        return _run_process(*launcher, *arguments, folder=tmp_path, environment=environment_of(**environment))

    return run_ranks


@pytest.fixture
def forked_start(fork_server: Any, tmp_path: Path, environment_of: Environment) -> Callable[..., Any]:
    """Starts `mm2-test` as `forked` runs it, in a context that ends with it: `pid`, `has_ended()`, `wait()`."""

    def start(*arguments: object, **environment: str) -> Any:
        given = ["-m", "neuron", *map(str, arguments)]
        return fork_server.started(given, folder=tmp_path, environment=environment_of(**environment))

    return start


@pytest.fixture
def forked_ranks(fork_server: Any, tmp_path: Path, environment_of: Environment) -> Process:
    """Runs `mm2-test` as two ranks that torchrun started, in forks: `--tp-degree 2` would import torch in each rank."""

    def run_there(
        *arguments: object, num_ranks: int = 2, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        given = ["-c", _RANKS, str(num_ranks), *map(str, arguments)]
        done: subprocess.CompletedProcess[str] = fork_server.run(
            given, folder=tmp_path, environment=environment_of(**environment)
        )
        return done

    return run_there


@pytest.fixture(scope="session")
def write_chunked_port(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Writes the device layer with so many of the small model's experts in a chunk, and gives its `--target`."""

    def write(experts_in_chunk: int, *, num_chunks: int) -> str:
        size_bytes = experts_in_chunk * _EXPERT_BYTES
        path = tmp_path_factory.mktemp("chunked") / "chunked.py"
        path.write_text(_CHUNKED_PORT.format(size_bytes=size_bytes, num_chunks=num_chunks))
        return f"{path}:Port"

    return write


@pytest.fixture
def write_port(tmp_path: Path) -> WritePort:
    """Writes a port's file and gives its `--target`; the source defines `Port`, or what `name` says."""

    def write(source: str, *, name: str = "Port", file: str = "port.py") -> str:
        path = tmp_path / file
        path.write_text(_PORT_IMPORTS + source)
        return f"{path}:{name}"

    return write


@pytest.fixture
def stumbling() -> str:
    """The source of a port that fails at a layer when `fail_at` says so."""
    return _STUMBLING_PORT


@pytest.fixture
def fail_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets the stumbling port fail at a layer; at -1, at none."""
    return lambda layer: monkeypatch.setenv("FAIL_AT", str(layer))


@pytest.fixture
def run_layer(run: Any, small: Path) -> Any:
    """Runs layer 0 of the small model through a target on the CPU."""

    def run_target(target: str, *arguments: object) -> Any:
        return run("single-layer", "--layer", 0, "--model", small, "--target", target, *SHORT, *arguments)

    return run_target


@pytest.fixture
def judge_layer(run: Any, on_small: tuple[object, ...]) -> Any:
    """Runs layer 1 of the small model on the golden's input through a target on the CPU; exit code and JSON."""

    def judge(target: str, *options: object) -> tuple[int, dict[str, Any]]:
        given = ("single-layer", "--layer", 1, *on_small, "--target", target, "--backend", "cpu")
        result = run(*given, *options, "--json", "--quiet")
        return result.exit_code, json.loads(result.stdout)

    return judge


@pytest.fixture
def tensors_of(run_layer: Any) -> Any:
    """The tensors that a target's run of layer 0 stored."""

    def read(target: str, *arguments: object) -> dict[str, torch.Tensor]:
        result = run_layer(target, *arguments)
        assert result.exit_code == 0, result.stderr
        return load_file(Path(json.loads(result.stdout)["directory"]) / "layer_0.safetensors")

    return read


@pytest.fixture(scope="session")
def needs_xla() -> None:
    """Skips where torch_xla is not installed."""
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip(f"torch_xla is not installed: {install_command('xla')} (Linux on x86-64)")


@pytest.fixture(scope="session")
def needs_nxdi(run_python: Process) -> None:
    """Skips where NxDI cannot be imported; in a process of its own, for it changes what it imports."""
    done = run_python("import neuronx_distributed_inference.models.model_base")
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it is not installed"])[-1]
        pytest.skip(f"neuronx_distributed_inference cannot be imported: {reason}")


@pytest.fixture
def vllm_neuron(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Puts a stand-in, which is given, in the vLLM Neuron plugin's place for one test."""
    folder = Path(__file__).parents[1] / "ports" / "vllm_neuron_stand_in"
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    yield folder
    for name in tuple(sys.modules):
        if name.partition(".")[0] in ("vllm", "vllm_neuron", "vllm_neuron_port", "replacing_port"):
            del sys.modules[name]


@pytest.fixture(scope="session")
def serve(
    forked_python: Process, tmp_path_factory: pytest.TempPathFactory, environment_of: Environment
) -> Callable[..., list[dict[str, Any]]]:
    """Runs several `mm2-test` commands in one new process; for each its exit code, stdout and stderr.

    `imports_torch` starts one that imports torch anew: for devices that torch loads with itself.
    """
    folder = tmp_path_factory.mktemp("python")

    def serve_all(
        commands: Sequence[Sequence[object]], *, imports_torch: bool = False, **environment: str
    ) -> list[dict[str, Any]]:
        texts = json.dumps([[*map(str, arguments)] for arguments in commands])
        if imports_torch:
            given = environment_of(**environment)
            done = _run_process("-c", _SERVE, folder=folder, environment=given, standard_input=texts)
        else:
            done = forked_python(_SERVE, standard_input=texts, **environment)
        assert done.returncode == 0, done.stderr
        results: list[dict[str, Any]] = json.loads(done.stdout)
        return results

    return serve_all


@pytest.fixture(scope="session")
def small(make_model: MakeModel) -> Path:
    """A model smaller than the toy, in BF16, for what needs no golden: 4 layers, hidden 64, 8 experts."""
    return make_model(SMALL, torch.bfloat16)


@pytest.fixture(scope="session")
def small_fp8(make_model: MakeModel) -> Path:
    """A model in FP8 as small as `small`, whose experts are not square."""
    return make_model(replace(SMALL, intermediate_size=32), torch.float8_e4m3fn)


@pytest.fixture(scope="session")
def copies(small_fp8: Path, make_model: MakeModel) -> dict[torch.dtype, Path]:
    """The small model whose experts are not square in FP8, BF16 and float32."""
    model = replace(SMALL, intermediate_size=32)
    others = (torch.bfloat16, torch.float32)
    return {
        torch.float8_e4m3fn: small_fp8,
        **{dtype: make_model(model, dtype) for dtype in others},
    }


@pytest.fixture(scope="session")
def small_golden(small_fp8: Path, make_golden: MakeGolden) -> Path:
    """The golden of the small model in FP8: every layer, all sites, the noise floor kept whole."""
    return make_golden(small_fp8, "--seq-len", "24,15")


@pytest.fixture(scope="session")
def on_small(small_fp8: Path, small_golden: Path) -> tuple[object, ...]:
    """Options of a command that judges the small model in FP8 by its golden."""
    return ("--model", small_fp8, "--golden", small_golden)


@pytest.fixture(scope="session")
def float32_golden(copies: dict[torch.dtype, Path], make_golden: MakeGolden) -> Path:
    """The small model's golden in float32, which has no BF16 noise and so no floor."""
    in_float32 = ("--dtype", "float32", "--noise-floor", "off")
    return make_golden(copies[torch.float32], *in_float32, "--seq-len", "24,15")


def _run_process(
    *arguments: object, folder: Path, environment: dict[str, str], standard_input: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments in a process of its own."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment,
        input=standard_input,
        capture_output=True,
        text=True,
        check=False,
    )
