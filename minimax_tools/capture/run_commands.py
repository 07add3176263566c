"""RunCommands: the commands that judge, name and repeat a run of a port, and those that come next for a capture.

Every command is complete: it can be pasted into a shell.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimax_tools.capture.further import ALSO
from minimax_tools.capture.manifest import Description
from minimax_tools.capture.mirror import address_of
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.resumption import is_numbered
from minimax_tools.capture.source import CaptureSource
from minimax_tools.capture.store import (
    DEFAULT_CAPTURES,
    DEVICE_SIDE,
    GOLDEN_SIDE,
    capture_directory,
    captures_folder,
    list_captures,
)
from minimax_tools.errors import CaptureError
from minimax_tools.model.run import Mode, Run
from minimax_tools.model.sites import find_level

# Advice where a run had other inputs than the golden's.
RUN_ON_THIS_GOLDEN = "Run the port on this golden."
_USUAL_DTYPE = "bfloat16"
# Options that change numbers, and that a run of several ranks records.
_RANK_OPTIONS = ("tp_degree", "ep_degree", "reduce_dtype")
# A file of mm2-test trace holds converted weights: there is no conversion to trace.
_COMPILED = "traced:"


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
    """Return the command that runs a port, named by `arguments`, on the newest golden of a checkpoint; or makes one.

    The golden is looked for in the usual folder and in the working directory. It must hold the layers of `run`, and
    have the batch [B,S] of `batch_shape`, if these are given.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommands:
    """The commands about one run, as shell lines; `port` is None if the run is another tool's dump."""

    model: str  # folder or hub id of the checkpoint
    golden: str  # folder of the golden
    run: str  # folder of the run
    port: Description | None  # description of the run: its port, backend, dtype and ranks
    golden_run: Run | None = None  # the layers and sites of the golden; None if another tool wrote it
    is_whole_port: bool = False  # whether the target is a whole port, and no layer
    target: str = ""  # the port as --target names it; empty to take the run's own
    reading: tuple[str, ...] = ()  # options that read another tool's dump, such as --map

    @classmethod
    def of(
        cls,
        golden: CaptureSource,
        run: CaptureSource,
        *,
        model: str | None = None,
        target: str | None = None,
        reading: tuple[str, ...] = (),
    ) -> RunCommands | None:
        """Return the commands of two captures; None if neither `model` nor a capture names the checkpoint."""
        made, golden_made = run.known_description, golden.known_description
        named = [one.provenance.model_source for one in (made, golden_made) if one is not None]
        if model is None and not named:
            return None
        return cls(
            model=model or named[0],
            golden=address_of(golden.directory),
            run=address_of(run.directory),
            port=made,
            golden_run=None if golden_made is None else golden_made.run,
            is_whole_port=run.read_passes() is not None,
            target=target or "",
            reading=reading,
        )

    @property
    def port_arguments(self) -> tuple[str, ...]:
        """The options that run the same port again: on the same golden and backend, in its dtype, by as many ranks."""
        made = self._port.provenance
        return (
            *("--model", self.model, "--golden", self.golden, "--target", self._target),
            *("--backend", made.backend),
            *_dtype_arguments(self._port),
            *_rank_arguments(made.options),
        )

    @property
    def can_trace_weights(self) -> bool:
        """True if the run has a port with a conversion, run layer by layer."""
        is_layer = self.port is not None and not self.is_whole_port
        return is_layer and not self._target.startswith(_COMPILED)

    @property
    def runs_all_layers(self) -> bool:
        """True unless the port is a file that holds one compiled layer."""
        return not self._target.startswith(_COMPILED) or "{layer}" in self._target

    def again(self) -> str:
        """Return the command that makes the same run again, into the same folder."""
        run = self._port.run
        words = ("model",) if self.is_whole_port else _run_words(run)
        return _line("mm2-test", *words, *self.port_arguments, *self._run_options(run), *self._place())

    def isolated(self) -> str:
        """Return the command that runs the same layers, each on the golden's input, and keeps every site."""
        return _line("mm2-test", "sweep", "--layers", _word_layers(self._port.run), *self.port_arguments)

    def sweep(self) -> str:
        """Return the command that runs all layers of the golden, each on the golden's input."""
        return _line("mm2-test", "sweep", *self.port_arguments)

    def single_layer(self, layer: int, *options: str) -> str:
        """Return the command that runs one layer on the golden's input, with every site."""
        return _line("mm2-test", "single-layer", "--layer", str(layer), *self.port_arguments, *options)

    def full(self) -> str:
        """Return the command that runs all layers in a chain, from the tokens to the logits."""
        return _line("mm2-test", "full", *self.port_arguments)

    def weights(self, layer: int) -> str:
        """Return the command that traces where the weights of a layer land in the port."""
        words = ("--model", self.model, "--target", self._target, "--layer", str(layer))
        ranks = _rank_arguments(self._port.provenance.options)
        return _line("mm2-test", "weights", *words, *_dtype_arguments(self._port), *ranks)

    def diagnose(self, *options: str) -> str:
        """Return the command that names the run's mistakes."""
        sides = ("--model", self.model, "--golden", self.golden, "--run", self.run)
        return _line("mm2-diagnose", *sides, *self.reading, *options)

    def show(self) -> str:
        """Return the command that lists what the run holds, and the sites that the port does not show."""
        return _line("mm2-test", "show", self.run)

    def map_template(self) -> str:
        """Return the command that prints a map of a dump to fill in."""
        return _line("mm2-test", "show", self.run, "--map-template")

    @property
    def _port(self) -> Description:
        assert self.port is not None, "a dump names no port"
        return self.port

    @property
    def _target(self) -> str:
        return self.target or self._port.provenance.target

    def _run_options(self, run: Run) -> tuple[str, ...]:
        """Return the options of a run that are not the usual ones: sites, decoded tokens and further outputs."""
        level = find_level(run.sites) or "all"
        has_usual_sites = level == "all" or run.component is not None or self.is_whole_port
        decoded = ("--decode", str(run.num_decoded)) if run.num_decoded else ()
        further = (
            word for text in self._port.provenance.options.get(ALSO, ()) for word in ("--also", str(text))
        )
        return (*(() if has_usual_sites else ("--sites", level)), *decoded, *further)

    def _place(self) -> tuple[str, ...]:
        """Return --output-dir, unless the run lies where mm2 puts it; a mended port replaces the run there."""
        usual = capture_directory(DEFAULT_CAPTURES, DEVICE_SIDE, self._port.run.name)
        return () if is_numbered(Path(self.run), usual) else ("--output-dir", self.run, "--overwrite")


def run_on_this_golden(golden: CaptureSource, run: CaptureSource) -> tuple[str, ...]:
    """Return the command that makes a run again, on this golden; () if the run is another tool's dump."""
    commands = RunCommands.of(golden, run)
    return () if commands is None or commands.port is None else (commands.again(),)


def _line(*words: str) -> str:
    return shlex.join(words)


def _dtype_arguments(description: Description) -> tuple[str, ...]:
    dtype = description.provenance.dtypes.get("weights", _USUAL_DTYPE)
    return () if dtype == _USUAL_DTYPE else ("--dtype", dtype)


def _rank_arguments(options: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        word
        for name in _RANK_OPTIONS
        if name in options
        for word in (f"--{name.replace('_', '-')}", str(options[name]))
    )


def _run_words(run: Run) -> tuple[str, ...]:
    """Return the command that makes a run, with its layers."""
    if run.component is not None:
        return ("component", "--layer", str(run.span.start), "--component", str(run.component))
    if run.mode is Mode.CHAINED:
        return ("full",) if run.model_sites else ("multi-layer", "--layers", _word_layers(run))
    if len(run.span) == 1:
        return ("single-layer", "--layer", str(run.span.start))
    return ("sweep", "--layers", _word_layers(run))


def _word_layers(run: Run) -> str:
    return f"{run.span.start}:{run.span.stop}"
