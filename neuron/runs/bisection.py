"""Bisection on a device: the search of a port's layers for the wrong ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from compare.chains.bisection import find_all, find_exhaustively, find_until_proof
from compare.chains.chain_judge import ChainJudge
from compare.chains.chain_limits import LONGEST_CHAIN
from compare.limits.criteria import Criteria
from minimax_tools.capture.manifest import Description, dtype_name
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.checkpoint.fingerprint import ModelFingerprint
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.progress import NoProgress
from minimax_tools.errors import IncomparableError, UsageError
from minimax_tools.model.run import bisect_run, sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.provenance import Provenance
from minimax_tools.results.probes import Bisection, BisectionFinding
from neuron.devices.runtime import Runtime
from neuron.runs.device_request import PortSetup
from neuron.runs.executor import LayerExecutor
from neuron.runs.golden_inputs import GoldenInputs
from neuron.runs.journal import open_journal
from neuron.runs.prober import Prober, Watch
from neuron.runs.run_report import CompileReport


class Extent(str, Enum):
    """The end of a bisection."""

    FIRST = "first"  # to the first finding that proves the port wrong
    ALL = "all"  # on after every finding, to the last layer
    EXHAUSTIVE = "exhaustive"  # every layer alone

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectRequest(PortSetup):
    """A bisection before it starts; its inputs are the golden's.

    Args:
        golden: Source of the chains' inputs, and their judge.
        span: The layers to search.
        extent: Where to stop.
        chain_length: Most layers to run one after the other before they are judged.
        criteria: Limits for a layer that ran alone.
        model_source: The model as the user named it.
    """

    golden: Capture
    span: Span
    extent: Extent
    chain_length: int
    criteria: Criteria
    model_source: str

    def __post_init__(self) -> None:
        if not 1 <= self.chain_length <= LONGEST_CHAIN:
            raise UsageError(
                f"a chain of {self.chain_length} layers cannot be judged",
                expected=f"1 to {LONGEST_CHAIN}: behind more, right ports differ by as much as the output",
                next_step="Leave out --chain-length, or choose a shorter one.",
            )


def bisect_layers(
    request: BisectRequest,
    *,
    runtime: Runtime,
    reader: CheckpointReader,
    directory: Path,
    is_anew: bool = False,
    watch: Watch = lambda _: nullcontext(NoProgress()),
) -> tuple[Bisection, CompileReport]:
    """Search the port's layers for the wrong ones, and note every probe in `directory`.

    Args:
        request: The bisection.
        runtime: The device.
        reader: The checkpoint.
        directory: The journal's folder.
        is_anew: Whether the probes of earlier runs are forgotten.
        watch: Makes the progress of a probe's layers.

    Raises:
        IncomparableError: The golden is of another model or dtype, or lacks an input or output of the layers.
        CaptureError: The directory is in use or holds something else, or the golden cannot be read.
        TargetError: The port could not be built, loaded or run.
    """
    golden, span = request.golden, request.span
    model = ModelFingerprint.of(reader, request.spec, span)
    needed = GoldenInputs(golden=golden, run=sweep_run(span, sites_level="layer"))
    needed.verify(model=model, dtype=request.dtype)
    _refuse_missing_outputs(golden, span)
    judge = ChainJudge(golden, criteria=request.criteria)
    with (
        open_journal(directory, _describe(request, model, runtime), is_anew=is_anew) as journal,
        LayerExecutor(request, runtime=runtime, reader=reader) as executor,
    ):
        prober = Prober(
            executor,
            golden,
            judge=judge,
            journal=journal,
            chain_length=request.chain_length,
            watch=watch,
        )
        findings = tuple(_search(request, prober))
    bisection = Bisection(
        span=span,
        reference=str(golden.directory),
        target=request.target.name,
        arguments=_arguments(request, runtime),
        probes=prober.probes,
        findings=findings,
        num_resumed=prober.num_resumed,
        sweep_visible=judge.sweep_visible(span),
    )
    return bisection, prober.compile_report()


def _search(request: BisectRequest, prober: Prober) -> Iterator[BisectionFinding]:
    if request.extent is Extent.EXHAUSTIVE:
        yield from find_exhaustively(request.span, prober.run)
    elif request.extent is Extent.ALL:
        yield from find_all(request.span, prober.run)
    else:
        yield from find_until_proof(request.span, prober.run)


def _arguments(request: BisectRequest, runtime: Runtime) -> tuple[str, ...]:
    named = {
        "model": request.model_source,
        "golden": request.golden.directory,
        "target": request.target.name,
        "backend": runtime.backend,
        "dtype": dtype_name(request.dtype),
        **request.target.sharing(runtime),
    }
    # The devices of one process are no option.
    named.pop("devices", None)
    return tuple(
        part for name, value in named.items() for part in (f"--{name.replace('_', '-')}", str(value))
    )


def _refuse_missing_outputs(golden: Capture, span: Span) -> None:
    missing = [layer for layer in span if golden.entry(layer, Site.OUTPUT) is None]
    if missing:
        raise IncomparableError(
            f"the golden {golden.directory} lacks the output of {len(missing)} layers, the first is layer {missing[0]}",
            next_step="Capture it with mm2-gpu extract-all, or choose layers that it holds.",
        )


def _describe(request: BisectRequest, model: ModelFingerprint, runtime: Runtime) -> Description:
    """Describe all that a probe's result depends on: a bisection resumes only where it is the same."""
    return Description(
        side=DEVICE_SIDE,
        run=bisect_run(request.span),
        provenance=Provenance(
            model=model,
            model_source=request.model_source,
            backend=str(runtime.backend),
            device=runtime.backend.description,
            dtypes={"weights": dtype_name(request.dtype)},
            target=request.target.name,
            target_digest=request.target.source_digest,
            options={
                "golden": _digest_golden(request.golden, request.span),
                "chain_length": request.chain_length,
                "criteria": request.criteria.name,
                **request.target.sharing(runtime),
            },
        ),
        inputs_digest=request.inputs.digest(),
        input_source=f"golden {request.golden.description.run.name}",
    )


def _digest_golden(golden: Capture, span: Span) -> str:
    """Return the sha256 over the digests of the chains' inputs and outputs in the golden."""
    digest = hashlib.sha256(golden.description.noise_floor.encode())
    for layer in span:
        for site in (Site.INPUT, Site.OUTPUT):
            entry = golden.entry(layer, site)
            digest.update(f"{layer} {site} {entry.sha256 if entry else None}\n".encode())
    return digest.hexdigest()
