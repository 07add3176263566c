"""Pipeline: a golden capture by several ranks, each of which reads and runs one slice of a plan.

What overlaps. The batch goes from rank to rank whole: rows apart would be other matrix products, whose sums no library
promises to be the same bits (cuBLAS and oneDNN choose their kernels by the number of rows), and a golden is one
forward pass of transformers. So the layers' forward passes follow one another, and everything else goes on at once on
all ranks: a rank reads its slice while those before it compute, passes its hidden states on as soon as its last layer
has run, and only then measures noise floors, digests and writes. With S the share of the forward passes in a single
process's time, N ranks take S + (1 − S) / N of it. A rank whose memory does not hold its slice streams it instead,
floors and all, and those behind it wait.

`torch.distributed.pipelining` has nothing for this: its schedules interleave micro-batches of one stage function,
with the stages' weights in memory and no part for what is written between the layers.

All ranks write into one capture directory, which must be on a file system that all of them see. Each lists its layers
in a manifest of its own, and rank 0 merges them: files and manifest are those of a single process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gpu_reference.golden import Golden
from gpu_reference.once_reader import OnceReader
from gpu_reference.placement import watched_memory
from gpu_reference.ranks import Ranks
from gpu_reference.recording import recording_layers, recording_model
from gpu_reference.resumption import running_only
from gpu_reference.streaming import StreamedModel, Streaming
from minimax_tools.capture.manifest import Description, Manifest
from minimax_tools.capture.parts import merge_parts, part_name
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.writer import CaptureWriter, open_capture
from minimax_tools.checkpoint.index import digest_shapes
from minimax_tools.checkpoint.names import layer_of
from minimax_tools.errors import CannotRunError, CaptureError
from minimax_tools.partition.planners import Stage
from minimax_tools.partition.read_record import RECORDS_FOLDER, ReadRecord
from minimax_tools.progress import Progress
from minimax_tools.sites import ModelSite, Site

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a rank has to do, of what is not stored yet.

    Args:
        layers: The layers to run; may be none.
        runs_head: Whether the final norm and the lm_head run.
        source: Where the first layer's input comes from: `tokens`, `stored`, or `rank` for the rank before.
        passes_on: Whether the rank behind needs its output.
    """

    layers: range
    runs_head: bool
    source: str
    passes_on: bool

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.layers or self.runs_head or self.passes_on)


def plan_steps(
    stages: Sequence[Stage], complete: Sequence[int], *, has_model_sites: bool
) -> tuple[Step, ...]:
    """What every rank has to do; all ranks find the same.

    Args:
        stages: One for each rank, in the order in which a token passes them.
        complete: Layers that are stored whole.
        has_model_sites: Whether the sites outside the layers are stored.
    """
    steps: list[Step] = []
    needed_behind = False
    for stage in reversed(stages):
        pending = [layer for layer in stage.layers if layer not in complete]
        first = pending[0] if pending else stage.layers.stop
        is_begun = first == 0 and stage.has_embedding
        source = "tokens" if is_begun else "stored" if first - 1 in complete else "rank"
        step = Step(
            layers=range(first, stage.layers.stop),
            runs_head=stage.has_head and not has_model_sites,
            source=source,
            passes_on=needed_behind,
        )
        needed_behind = not step.is_idle and source == "rank"
        steps.append(step)
    return tuple(reversed(steps))


def capture_by_ranks(
    golden: Golden, ranks: Ranks, stages: Sequence[Stage], directory: Path, *, progress: Progress
) -> None:
    """Run the inputs once, this rank its slice of them, and write the capture; a killed capture resumes.

    Args:
        golden: Opened with this rank's slice.
        ranks: All of them, joined.
        stages: Theirs, in order.
        directory: The capture directory, which all ranks see.
        progress: Told of every layer, on rank 0.

    Raises:
        CaptureError: The directory is in use or not shared, holds something else, or the disk is full.
        CannotRunError: The ranks would make different captures; or one of them died.
    """
    with _shared_capture(golden, ranks, directory, progress) as writer:
        steps = plan_steps(stages, writer.complete_layers, has_model_sites=writer.has_model_sites)
        rank_run = _RankRun(golden, ranks, writer, steps[ranks.rank])
        if not steps[ranks.rank].is_idle:
            rank_run.run()
            rank_run.write_record(directory / RECORDS_FOLDER)
        ranks.say(f"written/{ranks.rank}", True)
        if ranks.rank == 0:
            for rank in range(ranks.num_ranks):
                ranks.ask(f"written/{rank}")
            writer.finish()
            ranks.say("finished", True)
        ranks.ask("finished")
    ranks.finish()


class _RankRun:
    """One rank's slice, run once."""

    def __init__(self, golden: Golden, ranks: Ranks, writer: CaptureWriter, step: Step) -> None:
        self._golden = golden
        self._ranks = ranks
        self._writer = writer
        self._step = step
        streaming = golden.request.streaming
        assert streaming is not None, "a slice is streamed"
        assert streaming.part is not None, "a slice is part of a plan"
        self._streaming: Streaming = streaming
        self._part = streaming.part
        self._golden_writer = golden.writing_to(writer, _ToldProgress(ranks))
        self._waiting: list[tuple[int, Mapping[Site, torch.Tensor], torch.device]] = []
        self._last_output: torch.Tensor | None = None

    def run(self) -> None:
        """Read, run, pass on, write."""
        step, streaming = self._step, self._streaming
        if streaming.holds_part and isinstance(self._golden.weights, StreamedModel):
            self._golden.weights.hold(step.layers, with_head=step.runs_head)
        hidden_states = self._take()
        pending = tuple(layer for layer in step.layers if layer not in self._writer.complete_layers)
        model_sites = [ModelSite.FINAL_NORM, ModelSite.LOGITS] if step.runs_head else []
        if hidden_states is None:
            model_sites.append(ModelSite.EMBEDDING)
        with (
            running_only(self._golden.model, step.layers, with_head=step.runs_head),
            self._passing_on(),
            recording_layers(
                self._golden.model,
                pending,
                sites=self._golden_writer.wanted_sites,
                inputs=self._golden.request.inputs,
                sink=self._keep if streaming.holds_part else self._write_layer,
            ),
            recording_model(self._golden.model, tuple(model_sites)) as model_tensors,
        ):
            self._forward(hidden_states)
        while self._waiting:
            self._write_layer(*self._waiting.pop(0))
        if step.runs_head:
            self._write_model(model_tensors, hidden_states)

    def write_record(self, folder: Path) -> None:
        """Write what was read of the checkpoint."""
        reader = self._golden.reader
        assert isinstance(reader, OnceReader), "a slice is read once"
        ReadRecord.of(self._part.node.name, reader.sizes_read, bytes_read=reader.num_bytes_read).write(folder)

    def _take(self) -> torch.Tensor | None:
        """The input [B,S,H] of the first layer to run; None where it is made of the tokens."""
        step, request = self._step, self._golden.request
        if step.source == "tokens":
            return None
        if step.source == "stored":
            return self._writer.read_layer_output(step.layers.start - 1).to(self._streaming.device)
        shape = (*request.inputs.input_ids.shape, request.model.spec.hidden_size)
        return self._ranks.receive(shape, request.model.dtype, source=self._ranks.rank - 1)

    def _forward(self, hidden_states: torch.Tensor | None) -> None:
        inputs: dict[str, Any] = self._golden.model_inputs()
        if hidden_states is not None:
            inputs["inputs_embeds"] = hidden_states
            del inputs["input_ids"]
        model = self._golden.model
        with torch.no_grad(), watched_memory():
            if self._step.runs_head:
                model(**inputs, use_cache=False)
                return
            output = model.get_submodule("model")(**inputs, use_cache=False).last_hidden_state
        if self._step.passes_on and not self._step.layers:
            self._ranks.send(output, to=self._ranks.rank + 1)

    @contextmanager
    def _passing_on(self) -> Iterator[None]:
        """Send the last layer's output the moment it has run, before anything is written."""
        if not self._step.layers:
            yield
            return

        def hook(_: torch.nn.Module, __: Any, output: torch.Tensor) -> None:
            self._last_output = output.detach().clone()
            if self._step.passes_on:
                self._ranks.send(self._last_output, to=self._ranks.rank + 1)

        last = self._golden.model.get_submodule(f"model.layers.{self._step.layers[-1]}")
        handle = last.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def _keep(self, layer: int, captured: Mapping[Site, torch.Tensor], device: torch.device) -> None:
        self._waiting.append((layer, captured, device))

    def _write_layer(self, layer: int, captured: Mapping[Site, torch.Tensor], device: torch.device) -> None:
        self._ranks.check()
        self._golden_writer.write_layer(layer, captured, device)

    def _write_model(
        self, captured: Mapping[ModelSite, torch.Tensor], hidden_states: torch.Tensor | None
    ) -> None:
        last = self._last_output if self._last_output is not None else hidden_states
        assert last is not None, "a head has something before it"
        embedding = captured.get(ModelSite.EMBEDDING)
        self._golden_writer.write_model(
            {**captured, ModelSite.EMBEDDING: self._read_embedding() if embedding is None else embedding},
            hidden_states=last.cpu(),
        )

    def _read_embedding(self) -> torch.Tensor:
        """The first layer's input, once the rank that has the first layer wrote it."""
        if 0 not in self._writer.complete_layers:
            self._ranks.ask("layer/0")
        directory = self._writer.directory
        return Capture(directory, merge_parts(directory, Manifest.read(directory))).read(0, Site.INPUT)


class _ToldProgress:
    """Tells all ranks which layers are done."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def advance(self, layer: int, *, num_bytes: int) -> None:
        """Tell of a layer that is written."""
        self._ranks.say(f"layer/{layer}", num_bytes)

    def skip(self, layer: int) -> None:
        """Say nothing: all ranks know what is stored."""


@contextmanager
def _shared_capture(
    golden: Golden, ranks: Ranks, directory: Path, progress: Progress
) -> Iterator[CaptureWriter]:
    """The capture directory, opened by rank 0; all ranks write into it."""
    description = golden.describe()
    ranks.say(f"description/{ranks.rank}", description.as_json())
    ranks.say(f"outside/{ranks.rank}", _shapes_outside_layers(golden))
    if ranks.rank > 0:
        ranks.ask("open")
        yield _open_part(directory, ranks)
        return
    merged = _merge_descriptions(description, ranks)
    with open_capture(directory, merged, inputs=golden.request.inputs) as writer:
        for path in (directory / RECORDS_FOLDER).glob("*.json"):
            # Of a run that this one does not go on with.
            if not writer.complete_layers:
                path.unlink()
        ranks.say("open", merged.inputs_digest)
        with _showing_progress(ranks, writer.complete_layers, golden, progress):
            yield writer


def _open_part(directory: Path, ranks: Ranks) -> CaptureWriter:
    try:
        manifest = Manifest.read(directory)
    except CaptureError as error:
        raise CaptureError(
            f"{ranks.name(ranks.rank)} does not see the capture that rank 0 opened in {directory}",
            found=error.what,
            next_step="Give --output-dir a folder on a file system that all machines share.",
        ) from error
    return CaptureWriter(directory, manifest, manifest_name=part_name(ranks.rank))


@contextmanager
def _showing_progress(
    ranks: Ranks, complete: Sequence[int], golden: Golden, progress: Progress
) -> Iterator[None]:
    left = []
    for layer in golden.request.run.span:
        if layer in complete:
            progress.skip(layer)
        else:
            left.append(layer)

    def show() -> None:
        for layer in [layer for layer in left if ranks.has_said(f"layer/{layer}")]:
            left.remove(layer)
            progress.advance(layer, num_bytes=ranks.ask(f"layer/{layer}"))

    ranks.on_look(show)
    try:
        yield
    finally:
        ranks.on_look(None)
    show()


def _shapes_outside_layers(golden: Golden) -> dict[str, list[int]]:
    entries = golden.reader.index.entries
    return {name: list(entry.shape) for name, entry in entries.items() if layer_of(name) is None}


def _merge_descriptions(own: Description, ranks: Ranks) -> Description:
    """The description of what all ranks make together.

    Raises:
        CannotRunError: One of them would make another capture.
    """
    model = own.provenance.model
    layers, layer_tensors = dict(model.layers), dict(model.layer_tensors)
    shapes: dict[str, tuple[int, ...]] = {}
    for rank in range(ranks.num_ranks):
        other = Description.from_json(ranks.ask(f"description/{rank}"))
        theirs = other.provenance.model
        same_parts = replace(
            theirs,
            layers=model.layers,
            layer_tensors=model.layer_tensors,
            tensors_digest=model.tensors_digest,
        )
        differing = own.differences(
            replace(
                other, provenance=replace(other.provenance, model=same_parts, device=own.provenance.device)
            )
        )
        if differing:
            raise CannotRunError(
                f"{ranks.name(rank)} would make another capture than rank 0",
                found=f"other {', '.join(differing)}",
                next_step="Start all ranks with the same options, checkpoint, libraries and environment.",
            )
        layers |= theirs.layers
        layer_tensors |= theirs.layer_tensors
        for name, shape in ranks.ask(f"outside/{rank}").items():
            shapes[name] = tuple(shape)
    merged = replace(
        model,
        layers=dict(sorted(layers.items())),
        layer_tensors=dict(sorted(layer_tensors.items())),
        tensors_digest=digest_shapes(shapes),
    )
    return replace(own, provenance=replace(own.provenance, model=merged))
