"""Plugin for pytest: options that name a golden, and fixtures that give its layers to a port's tests.

    def test_layer(mm2_layer):                    # runs once for each layer of the golden
        port = mm2_layer.load(DecoderLayer)
        with mm2.record(port) as run:
            port(*mm2_layer.inputs)
        mm2.compare(mm2_layer, run).require()

pytest finds it where mm2 is installed. Without --mm2-golden its tests are skipped, and the last lines say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mm2.golden_layer import GoldenLayer, GoldenLayers

_NO_GOLDEN = "no golden: give --mm2-golden DIR"
_GOLDEN = pytest.StashKey["GoldenLayers | None"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that name the golden, its checkpoint and the layers to test."""
    group = parser.getgroup("mm2", "mm2: a port of MiniMax-M2 against a golden")
    group.addoption(
        "--mm2-golden",
        metavar="FOLDER|s3://…|hf://…",
        help="Golden capture, made by mm2-gpu, or its address, s3://bucket/folder. Default: tests that need it skip.",
    )
    group.addoption(
        "--mm2-model",
        metavar="FOLDER|HUB_ID",
        help="Checkpoint of the golden. Default: the one that it was made from, if it is on this machine.",
    )
    group.addoption(
        "--mm2-layers",
        metavar="A:B",
        help="Layers A to B-1 that mm2_layer runs over. Default: all of the golden.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Open the golden, and check the options.

    Raises:
        pytest.UsageError: The golden, its checkpoint or one of its layers is not there.
    """
    config.stash[_GOLDEN] = None
    directory = config.getoption("mm2_golden")
    if directory is None:
        return
    from minimax_tools.errors import Mm2Error
    from mm2.golden_layer import open_golden

    try:
        config.stash[_GOLDEN] = open_golden(directory, model=config.getoption("mm2_model"))
        _layers(config)
    except Mm2Error as error:
        raise pytest.UsageError(f"mm2: {error}") from error


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the golden."""
    golden = config.stash.get(_GOLDEN, None)
    if golden is not None:
        golden.close()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say which golden the tests are judged by."""
    golden = config.stash[_GOLDEN]
    return None if golden is None else f"mm2: {golden!r}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `mm2_layer` once for each layer."""
    if "mm2_layer" in metafunc.fixturenames:
        layers = _layers(metafunc.config)
        names = [f"layer_{layer}" for layer in layers] if layers else ["no golden"]
        metafunc.parametrize("mm2_layer", layers or (None,), indirect=True, ids=names)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were skipped because no golden was given: such a run proves nothing."""
    skipped = [
        report for report in terminalreporter.stats.get("skipped", ()) if _NO_GOLDEN in str(report.longrepr)
    ]
    if skipped:
        terminalreporter.write_line(f"mm2: {len(skipped)} skipped, {_NO_GOLDEN}", yellow=True)


@pytest.fixture(scope="session")
def mm2_golden(pytestconfig: pytest.Config) -> GoldenLayers:
    """Give the golden of --mm2-golden, opened: `mm2_golden.layer(5)`."""
    golden = pytestconfig.stash[_GOLDEN]
    if golden is None:
        pytest.skip(_NO_GOLDEN)
    return golden


@pytest.fixture
def mm2_layer(request: pytest.FixtureRequest, mm2_golden: GoldenLayers) -> GoldenLayer:
    """Give a layer of the golden: its input, weights and values. The test runs once for each."""
    return mm2_golden.layer(request.param)


def _layers(config: pytest.Config) -> tuple[int, ...]:
    """Return the layers that --mm2-layers chooses; () without a golden."""
    golden = config.stash[_GOLDEN]
    if golden is None:
        return ()
    text = config.getoption("mm2_layers")
    if text is None:
        return golden.layers
    from minimax_tools.errors import UsageError
    from minimax_tools.model.span import Span

    try:
        chosen = tuple(Span.parse(text))
    except UsageError as error:
        raise UsageError(f"--mm2-layers {text!r} names no layers", expected="A:B, for example 0:6") from error
    # A missing layer is refused here.
    return tuple(golden.layer(number).number for number in chosen)
