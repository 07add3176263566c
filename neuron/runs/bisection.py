"""Bisection on a device: the search of a port's layers for the wrong ones, and its finished probes in a file.

Each probe of the search runs a span of layers, cut into chains. A chain runs its layers one after the other from the
golden's input, and only its last output is judged. An interrupted bisection resumes from its journal.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from compare.chains.chain_judge import ChainJudge
from compare.chains.stream_search import find_all, find_exhaustively, find_until_proof
from compare.limits.criteria import Criteria
from compare.limits.tolerances import LONGEST_CHAIN
from minimax_tools.capture.manifest import Description
from minimax_tools.capture.mirror import address_of
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.checkpoint.fingerprint import fingerprint_model
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CaptureError, IncomparableError, UsageError
from minimax_tools.json_codec import decode, encode
from minimax_tools.machine.files import (
    LOCK_NAME,
    is_temporary,
    locked_directory,
    remove_abandoned,
    whole_capture_file,
)
from minimax_tools.machine.json_file import read_own_json
from minimax_tools.machine.progress import NoProgress, Progress
from minimax_tools.model.run import Extent, bisect_run, sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.provenance import ModelFingerprint
from minimax_tools.results.probes import Bisection, Chain, Probe
from minimax_tools.stored_dtype import dtype_name
from neuron.devices.compiler import AUTO, OFF, choose_compiler
from neuron.devices.runtime import Runtime
from neuron.runs.device_request import GoldenInputs, digest_sites
from neuron.runs.executor import LayerExecutor
from neuron.runs.layer_run import LayerInput, LayerRequest
from neuron.runs.port_setup import PortSetup
from neuron.runs.run_profile import CompileReport

logger = logging.getLogger(__name__)


JOURNAL_NAME = "bisection.json"
_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """The version of a journal's form."""

    schema_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """The content of a journal."""

    schema_version: int = _SCHEMA_VERSION
    description: Description
    probes: tuple[Probe, ...]


class Journal:
    """The probes of one bisection; `description` holds all that their results depend on, such as port and golden."""

    def __init__(self, directory: Path, description: Description, probes: tuple[Probe, ...]) -> None:
        self._directory = directory
        self._description = description
        self._probes = {probe.span: probe for probe in probes}
        self.num_found = 0  # probes that did not run again

    def probe(self, span: Span, run: Callable[[], Probe], *, what: str) -> Probe:
        """Return the probe of these layers: as an earlier run found it, else by `run`, and then it is on record."""
        probe = self._probes.get(span)
        if probe is not None:
            self.num_found += 1
            logger.info("%s: done before.", what)
            return probe
        logger.info("%s.", what)
        self._probes[span] = probe = run()
        self._write()
        return probe

    def _write(self) -> None:
        record = encode(_Record(description=self._description, probes=tuple(self._probes.values())))
        with whole_capture_file(self._directory / JOURNAL_NAME) as temporary:
            temporary.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def open_journal(directory: Path, description: Description, *, is_anew: bool) -> Iterator[Journal]:
    """Open the journal in `directory`, with the probes of earlier runs that have the same description.

    The folder is created if it is missing, and locked during the block. With `is_anew`, earlier probes are dropped.

    Raises:
        CaptureError: Another process writes there, the directory holds something else, or cannot be written to.
    """
    with locked_directory(directory):
        remove_abandoned(directory)
        _refuse_foreign(directory)
        probes = () if is_anew else _read_probes(directory / JOURNAL_NAME, description)
        journal = Journal(directory, description, probes)
        # Before any probe runs: a disk that cannot be written to is reported at once.
        journal._write()
        yield journal


def _refuse_foreign(directory: Path) -> None:
    own_names = (LOCK_NAME, JOURNAL_NAME)
    foreign_names = sorted(
        path.name for path in directory.iterdir() if path.name not in own_names and not is_temporary(path)
    )
    if foreign_names:
        raise CaptureError(
            f"{directory} holds something other than a bisection",
            found=", ".join(foreign_names[:3]),
            next_step="Choose another --output-dir.",
        )


def _read_probes(path: Path, description: Description) -> tuple[Probe, ...]:
    """Read the probes to resume from; return () and log why if an existing journal cannot be resumed."""
    if not path.exists():
        return ()
    try:
        record = read_own_json(path)
        # Another version may store probes in another form.
        is_same_version = decode(_Version, record).schema_version == _SCHEMA_VERSION
        kept = decode(_Record, record) if is_same_version else None
    except (OSError, ValueError) as error:
        logger.warning("Starting anew: %s cannot be read (%s).", path, error)
        return ()
    if kept is None:
        logger.info("Starting anew in %s: another version of mm2 wrote the journal there.", path.parent)
        return ()
    if differing := kept.description.differences(description):
        logger.info(
            "Starting anew in %s: the bisection there has other %s.", path.parent, ", ".join(differing)
        )
        return ()
    if kept.probes:
        logger.info("Resuming %s: %d probes were run before.", path.parent, len(kept.probes))
    return kept.probes


# Opens the progress display of a probe's layers.
OpenProgress = Callable[[Span], AbstractContextManager[Progress]]


# Each search gets the span, and a function that probes a part of it; it yields the findings.
_SEARCHES = {Extent.FIRST: find_until_proof, Extent.ALL: find_all, Extent.EXHAUSTIVE: find_exhaustively}


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectRequest(PortSetup):
    """A bisection before it starts; its inputs are the golden's.

    Raises:
        UsageError: A chain would be too long to be judged.
    """

    golden: Capture  # source of the chains' inputs, and their judge
    span: Span  # the layers to search
    extent: Extent
    chain_length: int  # number of layers of a chain, at most
    criteria: Criteria  # limits for a layer that ran alone

    def __post_init__(self) -> None:
        if not 1 <= self.chain_length <= LONGEST_CHAIN:
            raise UsageError(
                f"a chain of {self.chain_length} layers cannot be judged",
                expected=f"1 to {LONGEST_CHAIN}: behind more, right ports differ by as much as the output",
                next_step="Leave out --chain-length, or choose a shorter one.",
            )


def run_chain(
    executor: LayerExecutor, golden: Capture, span: Span, *, next_layer: int | None = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each layer of a chain with its output [B,S,H] on the CPU. The first layer gets the golden's input.

    `next_layer`, which runs after the chain, is read ahead.
    """
    states = golden.read(span.start, Site.INPUT)
    for layer in span:
        # No sites: only the output is judged, and all chains share their graphs.
        request = LayerRequest(
            layer=layer,
            layer_input=LayerInput.of(states, executor.setup.inputs),
            next_layer=layer + 1 if layer < span.last else next_layer,
            calls=executor.setup.inputs.plan_calls(),
        )
        states = executor.run(request).output
        yield layer, states


def bisect_layers(
    request: BisectRequest,
    *,
    runtime: Runtime,
    reader: CheckpointReader,
    directory: Path,
    is_anew: bool = False,
    open_progress: OpenProgress = lambda _: nullcontext(NoProgress()),
) -> tuple[Bisection, CompileReport]:
    """Search the port's layers for the wrong ones, and record every probe in a journal in `directory`.

    With `is_anew`, the probes that earlier runs recorded there are dropped; else they do not run again.
    """
    golden, span = request.golden, request.span
    model = fingerprint_model(reader, request.spec, span)
    # A chain may begin at any layer: so every layer's input is needed, as for a sweep.
    golden_inputs = GoldenInputs(golden=golden, run=sweep_run(span, sites_level="layer", graph=golden.graph))
    golden_inputs.verify(model=model, dtype=request.dtype)
    _refuse_missing_outputs(golden, span)
    judge = ChainJudge(golden, criteria=request.criteria)
    with (
        open_journal(directory, _describe(request, model, runtime), is_anew=is_anew) as journal,
        LayerExecutor(request, runtime=runtime, reader=reader) as executor,
    ):
        prober = _Prober(request, executor, judge, journal, open_progress)
        findings = tuple(_SEARCHES[request.extent](span, prober.probe))
    bisection = Bisection(
        span=span,
        reference=address_of(golden.directory),
        target=request.target.name,
        arguments=_arguments(request, runtime),
        probes=tuple(prober.probes),
        findings=findings,
        num_resumed=journal.num_found,
        # The smallest error in the MoE's delta that a sweep would see: the report compares the bisection's with it.
        sweep_visible=judge.sweep_visible(span),
    )
    return bisection, CompileReport.of(prober.counts, compiler=runtime.compiler and str(runtime.compiler))


@dataclass
class _Prober:
    """A runner of a bisection's probes. A probe that the journal holds does not run again."""

    request: BisectRequest
    executor: LayerExecutor
    judge: ChainJudge
    journal: Journal
    open_progress: OpenProgress
    probes: list[Probe] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Counts of compiled graphs: before the first layer that ran, and after each.
        self.counts = [self.executor.runtime.count_compiles()]

    def probe(self, span: Span) -> Probe:
        """Return the probe of `span`: its chains, up to the first that is wrong."""
        what = f"Probe {len(self.probes) + 1}: {span}"
        self.probes.append(self.journal.probe(span, lambda: self._run_probe(span), what=what))
        return self.probes[-1]

    def _run_probe(self, span: Span) -> Probe:
        chains: list[Chain] = []
        with self.open_progress(span) as progress:
            length = self.request.chain_length
            for start in range(span.start, span.stop, length):
                stop = min(start + length, span.stop)
                next_layer = stop if stop < span.stop else None
                chain = self._run_and_judge(Span(start, stop), next_layer=next_layer, progress=progress)
                chains.append(chain)
                if not chain.is_right:
                    break
        return Probe(span=span, chains=tuple(chains))

    def _run_and_judge(self, span: Span, *, next_layer: int | None, progress: Progress) -> Chain:
        executor = self.executor
        num_bytes_shown = executor.reader.num_bytes_read
        last_output: torch.Tensor | None = None
        for layer, output in run_chain(executor, self.request.golden, span, next_layer=next_layer):
            last_output = output
            self.counts.append(executor.runtime.count_compiles())
            num_bytes_read = executor.reader.num_bytes_read
            progress.advance(layer, num_bytes=num_bytes_read - num_bytes_shown)
            num_bytes_shown = num_bytes_read
        assert last_output is not None, "a span is never empty"
        return self.judge.judge(span, last_output)


def _refuse_missing_outputs(golden: Capture, span: Span) -> None:
    missing = [layer for layer in span if golden.entry(layer, Site.OUTPUT) is None]
    if missing:
        raise IncomparableError(
            f"the golden {golden.directory} lacks the output of {len(missing)} layers, the first is layer {missing[0]}",
            next_step="Capture it with mm2-gpu extract-all, or choose layers that it holds.",
        )


def _describe(request: BisectRequest, model: ModelFingerprint, runtime: Runtime) -> Description:
    """Describe all that a probe's result depends on. A bisection resumes only from a journal of this description."""
    golden = request.golden
    sites = [(layer, site) for layer in request.span for site in (Site.INPUT, Site.OUTPUT)]
    return Description(
        side=DEVICE_SIDE,
        run=bisect_run(request.span, graph=golden.graph),
        provenance=request.provenance(
            runtime,
            model=model,
            options={
                "golden": digest_sites(golden, sites, header=golden.description.noise_floor),
                "chain_length": request.chain_length,
                "criteria": request.criteria.name,
            },
        ),
        inputs_digest=request.inputs.digest(),
        input_source=f"golden {request.golden.description.run.name}",
        calls=request.inputs.plan_calls(),
    )


def _arguments(request: BisectRequest, runtime: Runtime) -> tuple[str, ...]:
    """Return the command-line arguments that run this port again, for the commands that the report suggests."""
    options = {
        "model": request.model_source,
        "golden": address_of(request.golden.directory),
        "target": request.target.name,
        "backend": runtime.backend,
        "dtype": dtype_name(request.dtype),
        **request.target.sharing(runtime),
    }
    if runtime.compiler is not choose_compiler(AUTO, runtime.backend):
        options["compile"] = runtime.compiler or OFF
    return tuple(
        argument
        for name, value in options.items()
        for argument in (f"--{name.replace('_', '-')}", str(value))
    )
