"""The toy that most tests share, and skips with a reason for what this machine cannot run."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import click
import click.testing
import pytest
import torch

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.weight_names import CORRECTION_BIAS, GATE, layer_prefix
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

MakeGolden = Callable[..., Path]
MakeModel = Callable[[SyntheticModel, torch.dtype], Path]
Command = Callable[..., click.testing.Result]
Loader = Callable[[Path], ModuleType]
Process = Callable[..., "subprocess.CompletedProcess[str]"]

# Two rows of unequal length: padding, and positions past the rotary period of the toy's fastest pair.
TOY_LENGTHS = "48,33"

_PACKAGES = ("minimax_tools", "gpu_reference", "compare", "neuron", "reports")

_TESTS = Path(__file__).parent

_CHECKPOINT = "MM2_TEST_CHECKPOINT"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="write the golden texts of reports anew")


@pytest.fixture
def expect_text(request: pytest.FixtureRequest) -> Callable[[str, Mapping[str, str]], None]:
    """Compares texts, by their titles, with the file `texts/NAME` beside the test; --update writes it."""

    def compare(name: str, texts: Mapping[str, str]) -> None:
        file = request.path.parent / "texts" / name
        text = "\n".join(f"==== {title}\n{words.rstrip()}\n" for title, words in texts.items())
        if request.config.getoption("--update"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert text == file.read_text(encoding="utf-8"), "--update writes the golden text anew"

    return compare


def pytest_configure() -> None:
    """Divide the cores among the processes that share the tests: threads beyond them wait busily."""
    num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if num_processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        num_threads = max(1, (os.cpu_count() or 1) // num_processes)
        torch.set_num_threads(num_threads)
        # For the processes that tests start.
        os.environ["OMP_NUM_THREADS"] = str(num_threads)


def pytest_collection_finish() -> None:
    keep_for_good()


@pytest.fixture(autouse=True, scope="module")
def modules_kept() -> None:
    """Keep for good what the tests before this module imported and made."""
    keep_for_good()


def keep_for_good() -> None:
    """Spare what lives now (modules, above all) the collections of garbage: each run of a command makes a full one."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, missing in (
        ("neuron", _missing_neuron),
        ("gpu", _missing_gpu),
        ("checkpoint", _missing_checkpoint),
    ):
        reason = missing() if item.get_closest_marker(marker) else None
        if reason is not None:
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def untold() -> Iterator[None]:
    """Nobody has set up logging: commands that ran before in this process have."""
    loggers = [logging.getLogger(package) for package in _PACKAGES]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    for logger in loggers:
        _set_up(logger, level=logging.NOTSET, propagate=True, handlers=[])
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        _set_up(logger, level=level, propagate=propagate, handlers=handlers)


def _set_up(logger: logging.Logger, *, level: int, propagate: bool, handlers: list[logging.Handler]) -> None:
    # Setting a level empties the caches of all loggers.
    if logger.level != level:
        logger.setLevel(level)
    logger.propagate, logger.handlers[:] = propagate, handlers


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic FP8 checkpoint: 4 layers, hidden 256, 32 experts, several shards, a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint") / "toy"
    synthesize(folder, model=SyntheticModel(), dtype=torch.float8_e4m3fn, shard_size_bytes=4_000_000, seed=0)
    return folder


@pytest.fixture(scope="session")
def toy_bf16(make_model: MakeModel) -> Path:
    """A BF16 copy of the model `toy`."""
    return make_model(SyntheticModel(), torch.bfloat16)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Makes a synthetic checkpoint of a model in a dtype, and returns its folder."""

    def make(model: SyntheticModel, dtype: torch.dtype) -> Path:
        folder = tmp_path_factory.mktemp("model") / str(dtype).removeprefix("torch.")
        synthesize(folder, model=model, dtype=dtype, shard_size_bytes=None, seed=0)
        return folder

    return make


@pytest.fixture(scope="session")
def make_golden(tmp_path_factory: pytest.TempPathFactory) -> MakeGolden:
    """Makes a golden of a model by `mm2-gpu extract-all`, or by another command, and returns its folder."""

    def make(model: Path, *options: object, command: str = "extract-all") -> Path:
        directory = tmp_path_factory.mktemp("golden") / "full_model"
        words = (command, "--model", model, *options, "--output-dir", directory, "--quiet")
        result = click.testing.CliRunner().invoke(mm2_gpu, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        return directory

    return make


@pytest.fixture(scope="session")
def golden(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's golden: every layer, all sites, the noise floor kept whole, certified."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: goldens are made with it, and it needs Python 3.11")
    directory = tmp_path_factory.mktemp("golden") / "full_model"
    arguments = ["extract-all", "--model", str(toy), "--seq-len", TOY_LENGTHS, "--output-dir", str(directory)]
    result = click.testing.CliRunner().invoke(mm2_gpu, [*arguments, "--certify", "--quiet"])
    assert result.exit_code == 0, result.output
    # transformers' modules are here only now.
    keep_for_good()
    return directory


@pytest.fixture(scope="session")
def load_with_float32_router() -> Callable[..., Any]:
    """Loads transformers' own model of a checkpoint in BF16, its routers as they are stored."""

    def load(folder: Path, **options: Any) -> Any:
        from transformers import MiniMaxM2ForCausalLM

        model = MiniMaxM2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()
        with CheckpointReader(folder) as reader:
            for index, layer in enumerate(model.model.layers):
                gate, bias = (reader.read(layer_prefix(index) + name) for name in (GATE, CORRECTION_BIAS))
                layer.mlp.gate.weight = torch.nn.Parameter(gate)
                layer.mlp.e_score_correction_bias = bias
        return model

    return load


@pytest.fixture(scope="session")
def load_module() -> Loader:
    """Loads the module of a Python file: nothing imports tests and scripts by name."""
    return _load_module


@pytest.fixture(scope="session")
def hub_module() -> ModuleType:
    """`hub_server.py` beside this file."""
    return _load_module(_TESTS / "hub_server.py")


@pytest.fixture
def hub(hub_module: ModuleType) -> Iterator[Any]:
    """A hub on this machine: `hub.add("owner/name", FOLDER)`, `hub.plant(...)`, `hub.log`."""
    with hub_module.HubServer() as server:
        yield server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Any]:
    """A server of S3 on this machine, for all tests of the process."""
    for package in ("s3fs", "moto", "flask", "flask_cors"):
        pytest.importorskip(package, reason=f"{package} is not installed: it is in the extra dev")
    with _load_module(_TESTS / "s3_server.py").S3Server() as server:
        yield server


@pytest.fixture
def s3(s3_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty bucket `lab`, credentials and an empty cache: `s3.plant(...)`, `s3.asked(...)`."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_ENDPOINT_URL_S3": s3_server.endpoint,
        "MM2_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    s3_server.reset("lab")
    return s3_server


@pytest.fixture
def command() -> Command:
    """Runs a command in this process, as `command(main, "show", directory)`; a crash is raised."""

    def run(main: click.Command, *arguments: object) -> click.testing.Result:
        result = click.testing.CliRunner().invoke(main, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture(scope="session")
def environment_of() -> Callable[..., dict[str, str]]:
    """The variables of a process: none that say which device or rank it is."""

    def variables(**given: str) -> dict[str, str]:
        inherited = {
            name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "WORLD_SIZE")
        }
        return {**inherited, "PYTHONPATH": str(_TESTS.parent), "OMP_NUM_THREADS": "1", **given}

    return variables


@pytest.fixture(scope="module")
def as_in_forks(environment_of: Callable[..., dict[str, str]]) -> Iterator[None]:
    """Lets this process compute as forks do: a capture lists the variables, and threads change a sum's last digits.

    torch_xla sets PJRT_DEVICE in a process where an earlier test opened a device.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", environment_of()["OMP_NUM_THREADS"])
        patch.delenv("PJRT_DEVICE", raising=False)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[Any]:
    """`ForkServer` of `fork_server.py`."""
    server = _load_module(_TESTS / "fork_server.py").ForkServer()
    yield server
    server.close()


@pytest.fixture
def forked(fork_server: Any, tmp_path: Path, environment_of: Callable[..., dict[str, str]]) -> Process:
    """Runs `mm2-test` in the test's folder, in a fork of a process that has torch imported."""

    def run_there(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        given = ["-m", "neuron", *map(str, arguments)]
        done: subprocess.CompletedProcess[str] = fork_server.run(
            given, folder=tmp_path, environment=environment_of(**environment)
        )
        return done

    return run_there


@pytest.fixture(scope="session")
def forked_python(
    fork_server: Any,
    tmp_path_factory: pytest.TempPathFactory,
    environment_of: Callable[..., dict[str, str]],
) -> Process:
    """Runs Python code with arguments in a fork of a process that has torch imported: seconds less than a new one.

    What the code imports besides may be named in `modules`: it is imported once for all programs that name the same.
    `streams` has the path of a terminal or a FIFO that takes the place of a standard stream, by its number.
    """

    def run_code(
        code: str,
        *arguments: object,
        folder: Path | None = None,
        standard_input: str = "",
        modules: Sequence[str] = (),
        streams: Mapping[int, str] = MappingProxyType({}),
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        folder = tmp_path_factory.mktemp("python") if folder is None else folder
        done: subprocess.CompletedProcess[str] = fork_server.run(
            ["-c", code, *map(str, arguments)],
            folder=folder,
            environment=environment_of(**environment),
            standard_input=standard_input,
            modules=modules,
            streams=streams,
        )
        return done

    return run_code


@pytest.fixture(scope="session")
def golden_modules() -> tuple[str, ...]:
    """The modules that a program imports which makes goldens or splits models: they take seconds."""
    return (
        "transformers.models.minimax_m2.modeling_minimax_m2",
        "gpu_reference.golden.golden",
        "minimax_tools.split.factory",
    )


def _load_module(file: Path) -> ModuleType:
    """Load the module of a file, anew at each call."""
    specification = importlib.util.spec_from_file_location(file.stem, file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    # Its dataclasses look their module up by name.
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def _missing_neuron() -> str | None:
    if not list(Path("/dev").glob("neuron*")):
        return "no AWS Neuron device: there is no /dev/neuron* on this machine"
    if importlib.util.find_spec("torch_neuronx") is None:
        return "torch-neuronx is not installed"
    return None


def _missing_gpu() -> str | None:
    return None if torch.cuda.is_available() else "no CUDA device: torch.cuda.is_available() is False"


def _missing_checkpoint() -> str | None:
    folder = os.environ.get(_CHECKPOINT)
    if folder is None:
        return f"no checkpoint: set {_CHECKPOINT} to a folder that holds MiniMax-M2"
    if not (Path(folder) / "config.json").is_file():
        return f"no checkpoint: {_CHECKPOINT}={folder} holds no config.json"
    return None
