"""Commands that come next for a capture, or for a checkpoint that has no golden yet."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from minimax_tools.capture.address_records import address_of
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import CaptureSource
from minimax_tools.capture.store import GOLDEN_SIDE, list_captures
from minimax_tools.command_line.options import captures_folder
from minimax_tools.errors import CaptureError
from minimax_tools.model.run import Run


def make_golden(model: str) -> str:
    """Return the command that makes a golden of a checkpoint."""
    return shlex.join(golden_words(model))


def golden_words(model: str, *options: str) -> tuple[str, ...]:
    """Return the words of the command that makes a golden of a checkpoint, with further options."""
    return ("mm2-gpu", "extract-all", "--model", model, *options)


def certify_golden(golden: Path, model: str) -> str:
    """Return the command that checks a golden against its checkpoint."""
    return shlex.join(("mm2-gpu", "certify", "--model", model, "--golden", address_of(golden)))


def judge_port(golden: Path | str, run: Run, *, model: str, arguments: tuple[str, ...] = ()) -> str:
    """Return the command that runs a port on a golden of some layers, in a folder or at a remote address.

    `arguments` name the port.
    Without them it runs mm2's own layer, which shows that the machine and the golden are right.
    """
    place = golden if isinstance(golden, str) else address_of(golden)
    words: tuple[str, ...]
    if run.model_sites:  # all layers
        words = ("sweep",)
    elif len(run.span) == 1:
        words = ("single-layer", "--layer", str(run.span.start))
    else:
        words = ("sweep", "--layers", f"{run.span.start}:{run.span.stop}")
    return shlex.join(("mm2-test", *words, "--model", model, "--golden", place, *arguments))


def after_golden(golden: Capture, *, model: str | None = None) -> tuple[str, ...]:
    """Return what comes next for a golden: its check, unless that is done, and the run of a port on it."""
    made = golden.description
    model = model or made.provenance.model_source
    certificate = golden.certificate
    if certificate is not None and not golden.has_void_certificate and not certificate.has_passed:
        return (shlex.join(("mm2-gpu", "show", address_of(golden.directory))),)
    certify = () if golden.manifest.is_certified else (certify_golden(golden.directory, model),)
    return (*certify, judge_port(golden.directory, made.run, model=model))


def after_capture(source: CaptureSource) -> tuple[str, ...]:
    """Return what comes next for a capture that is whole: of a golden its check, of a run its comparison."""
    folder = address_of(source.directory)
    if source.listing() is not None:
        return (shlex.join(("mm2-test", "show", folder, "--map-template")),)
    if isinstance(source, Capture) and source.description.side == GOLDEN_SIDE:
        return after_golden(source)
    return (shlex.join(("mm2-compare", "--run", folder)),)


def judge_port_of(
    model: str, *arguments: str, run: Run | None = None, batch_shape: tuple[int, int] | None = None
) -> str:
    """Return the command that runs a port, named by `arguments`, on the newest golden of a checkpoint.

    It is looked for in the usual folder and in the working directory. If no golden of the checkpoint is there, return
    the command that makes one.

    Args:
        model: The checkpoint.
        arguments: Options that name the port.
        run: The run to make, of layers that the golden must hold; None for the golden's own layers.
        batch_shape: The only batch [B,S] that the port takes; None if it takes any.
    """

    def is_fit(golden: Capture) -> bool:
        holds_layers = run is None or set(run.span) <= set(golden.layers)
        return holds_layers and (batch_shape is None or batch_shape == golden.read_inputs().batch_shape)

    golden = next(filter(is_fit, _goldens_of(model)), None)
    if golden is None:
        return make_golden(model)
    run = run or golden.description.run
    return judge_port(_shorten(golden.directory), run, model=model, arguments=arguments)


def _goldens_of(model: str) -> Iterator[Capture]:
    """Yield the goldens of a checkpoint, the newest first; manifests are read as they are asked for."""
    for directory in list_captures(captures_folder() / GOLDEN_SIDE, Path.cwd()):
        try:
            capture = Capture.open(directory)
        except CaptureError:
            continue
        made = capture.description
        # A folder is named in many ways, a hub id in one.
        is_same = made.provenance.model_source == model or _are_same(made.provenance.model_source, model)
        if made.side == GOLDEN_SIDE and is_same:
            yield capture


def _are_same(source: str, model: str) -> bool:
    return Path(model).is_dir() and Path(source).resolve() == Path(model).resolve()


def _shorten(folder: Path) -> Path:
    """Return a folder as the user would name it from where he is."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
