"""A golden capture by several ranks: each reads and runs one slice of a plan.

The layers' forward passes follow one another; everything else runs on all ranks at once:

- A rank reads its slice while the ranks before it compute.
- It passes its hidden states on as soon as its last layer has run.
- Only then it measures noise floors, digests and writes.

A rank whose memory does not hold its slice streams it instead, floors included, and the ranks behind it wait.

The batch goes from rank to rank whole. In parts, as by `torch.distributed.pipelining`, it would be computed by other
matrix products: cuBLAS and oneDNN choose kernels by the number of rows, and do not promise the same bits.

All ranks write into one capture directory. Each lists its layers in its own manifest, so that a killed run resumes, and
sends the manifest to rank 0 at the end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gpu_reference.golden.golden import Golden
from gpu_reference.golden.golden_writer import running_only
from gpu_reference.golden.recording import recording_layers, recording_model
from gpu_reference.pipeline.shared_capture import CaptureProposal, open_shared_capture
from gpu_reference.streaming.streaming import OnceReader, StreamedModel, Streaming
from minimax_tools.capture.manifest import Entry, Manifest
from minimax_tools.capture.read_record import RECORDS_FOLDER, ReadRecord
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.writer import CaptureWriter, read_shared, refuse_other_owner
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.errors import CannotRunError, CaptureError, CheckpointError
from minimax_tools.json_codec import decode, encode
from minimax_tools.machine.progress import Progress
from minimax_tools.model.architecture import Architecture
from minimax_tools.model.run import Run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.stored_names import StoredNames
from minimax_tools.model.weight_names import head_name
from minimax_tools.partition.node import Stage
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.ranks.rank_group import RankGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The work of one rank."""

    layers: range  # layers to run: the stage's, from the first that is not stored; may be none
    runs_head: bool  # whether the final norm and the lm_head run
    source: str  # source of the first layer's input: `tokens`, `stored`, or `rank` for the rank before
    passes_on: bool  # whether the next rank needs the output

    @property
    def is_idle(self) -> bool:
        """True if the rank has nothing to do."""
        return not (self.layers or self.runs_head or self.passes_on)


def plan_steps(
    stages: Sequence[Stage], complete: Sequence[int], *, has_model_sites: bool
) -> tuple[Step, ...]:
    """Return the step of every rank. All ranks compute the same steps.

    Args:
        stages: Stage of each rank, in the order in which a token passes them.
        complete: Numbers of the layers that are stored whole.
        has_model_sites: Whether the sites outside the layers are stored.
    """
    steps: list[Step] = []
    # From the last rank to the first: a rank passes its output on if the next one waits for it.
    is_needed_next = False
    for stage in reversed(stages):
        pending = [layer for layer in stage.layers if layer not in complete]
        first = pending[0] if pending else stage.layers.stop
        if first == 0 and stage.has_embedding:
            source = "tokens"
        elif first - 1 in complete:
            source = "stored"
        else:
            source = "rank"
        step = Step(
            layers=range(first, stage.layers.stop),
            runs_head=stage.has_head and not has_model_sites,
            source=source,
            passes_on=is_needed_next,
        )
        is_needed_next = not step.is_idle and source == "rank"
        steps.append(step)
    return tuple(reversed(steps))


def validate_plan(plan: PartitionPlan, folder: Path, spec: ModelSpec, part: Slice, *, is_slice: bool) -> None:
    """Check a plan against a checkpoint: against its config.json and, if all headers are here, all its tensors.

    If `is_slice`, `folder` holds the slice `part` alone. Opening the slice then shows whether it is whole.

    Raises:
        CheckpointError: The plan is not whole, or not this checkpoint's; all faults are listed.
    """
    architecture = replace(Architecture.of(plan.model_type), num_layers=spec.num_hidden_layers)
    if plan.num_hidden_layers != spec.num_hidden_layers:
        raise CheckpointError(
            f"the plan for {plan.model} is not for the checkpoint in {folder}",
            expected=f"{plan.num_hidden_layers} layers",
            found=f"{spec.num_hidden_layers}",
            next_step="Give --model the checkpoint that was planned for, or plan anew: mm2-split plan.",
        )
    # A plan names tensors as they are stored.
    index = (
        None
        if is_slice
        else TensorIndex.from_folder(folder, layers=part.stage.layers, stored_names=StoredNames())
    )
    entries = None if index is None or index.absent else index.entries
    plan.validate(entries, architecture, folder=folder)


# Key under which the rank of layer 0 publishes where it wrote that layer's input, the embedding's output.
_LAYER_0_INPUT = "first_input"
# Seconds between two looks for layers to show.
_LOOK_S = 0.5


def capture_by_ranks(
    golden: Golden,
    ranks: RankGroup,
    plan: PartitionPlan,
    directory: Path,
    *,
    progress: Progress,
    overwrites: bool = False,
) -> None:
    """Run this rank's slice on the inputs, and write the capture with the other ranks; a killed capture resumes.

    `golden` was opened with this rank's slice, and all ranks see `directory`. Rank 0 shows the progress of all ranks.
    With `overwrites`, another finished golden in `directory` is replaced.

    Raises:
        CaptureError: The directory is in use or not shared, holds something else, or the disk is full.
        CannotRunError: The ranks would write different captures, or one of them died.
    """
    proposal = CaptureProposal.of(golden, plan)
    with open_shared_capture(ranks, proposal, golden, directory, overwrites=overwrites) as writer:
        steps = plan_steps(
            [part.stage for part in plan.used], writer.complete_layers, has_model_sites=writer.has_model_sites
        )
        with _showing_progress(ranks, writer.complete_layers, golden.request.run, progress):
            rank_run = _RankRun(golden, ranks, writer, steps[ranks.rank], plan=proposal.plan)
            if not steps[ranks.rank].is_idle:
                rank_run.run()
            # Wait until the next rank has received all.
            ranks.flush()
            manifests = ranks.gather(encode(writer.manifest))
        if ranks.rank == 0:
            for manifest in manifests[1:]:
                writer.add_part(decode(Manifest, manifest))
            _require_whole(writer.manifest, golden.request.run, directory)
            writer.finish()


class _RankRun:
    """The run of one rank's slice: take the first layer's input, run, pass the output on, then write.

    A held slice is written after the output was passed on, so that the next rank does not wait. A streamed slice is
    written layer by layer, because noise floors need the layer's weights.
    """

    def __init__(
        self, golden: Golden, ranks: RankGroup, writer: CaptureWriter, step: Step, *, plan: str
    ) -> None:
        self._golden = golden
        self._ranks = ranks
        self._writer = writer
        self._step = step
        streaming = golden.request.streaming
        assert streaming is not None, "a slice runs by `Streaming`, held or not"
        assert streaming.part is not None, "a slice is part of a plan"
        self._streaming: Streaming = streaming
        self._golden_writer = golden.make_writer(writer, _PublishedProgress(ranks))
        # Layers of a held slice that ran and are not written yet.
        self._unwritten: list[tuple[int, Mapping[Site, torch.Tensor], torch.device]] = []
        self._last_output: torch.Tensor | None = None
        self._records_folder = writer.directory / RECORDS_FOLDER
        # The bytes that this rank reads of each tensor; `plan` is the plan's digest.
        self._record = ReadRecord.begun(streaming.part.node.name, plan=plan)
        if writer.complete_layers:
            self._record = _read_earlier(self._records_folder, self._record)

    def run(self) -> None:
        """Run what the step says."""
        step, streaming = self._step, self._streaming
        pending = tuple(layer for layer in step.layers if layer not in self._writer.complete_layers)
        self._keep_tied_head()
        if streaming.holds_part and isinstance(self._golden.weights, StreamedModel):
            self._golden.weights.hold(step.layers, with_head=step.runs_head)
        hidden_states = self._first_input()
        model_sites = (ModelSite.FINAL_NORM, ModelSite.LOGITS) if step.runs_head else ()
        with (
            running_only(self._golden.model, step.layers, with_head=step.runs_head),
            self._sending_output(),
            recording_layers(
                self._golden.model,
                pending,
                sites=self._golden_writer.wanted_sites,
                inputs=self._golden.request.inputs,
                graph=self._golden.request.model.spec.graph,
                sink=self._write_later if streaming.holds_part else self._write_layer,
            ),
            recording_model(self._golden.model, model_sites) as model_tensors,
        ):
            self._forward(hidden_states)
        while self._unwritten:
            self._write_layer(*self._unwritten.pop(0))
        self._write_read_record()
        if step.runs_head:
            self._write_model(model_tensors, hidden_states)

    def _keep_tied_head(self) -> None:
        """Keep the tensor that is both embedding and head after its first read, if this rank needs it twice."""
        spec, reader = self._golden.request.model.spec, self._golden.reader
        if spec.tie_word_embeddings and self._step.runs_head and self._step.source == "tokens":
            assert isinstance(reader, OnceReader), "a slice is read once"
            reader.expect_again([head_name(spec)])

    def _write_read_record(self) -> None:
        """Record the bytes read so far: before the layer made of them is listed, so that no read goes uncounted."""
        reader = self._golden.reader
        assert isinstance(reader, OnceReader), "a slice is read once"
        stored = reader.index.stored_names.stored
        sizes, bytes_read = (
            {stored(name): size for name, size in read.items()}
            for read in (reader.sizes_read, reader.bytes_read_by_name)
        )
        self._record.followed_by(sizes, bytes_read).write(self._records_folder)

    def _first_input(self) -> torch.Tensor | None:
        """Return the input [B,S,H] of the first layer to run; None if the model computes it from the tokens."""
        step, request = self._step, self._golden.request
        if step.source == "tokens":
            return None
        if step.source == "stored":
            return self._read_stored(step.layers.start - 1, Site.OUTPUT).to(self._streaming.device)
        shape = (*request.inputs.input_ids.shape, request.model.spec.hidden_size)
        return self._ranks.receive(shape, request.model.dtype, source=self._ranks.rank - 1)

    def _forward(self, hidden_states: torch.Tensor | None) -> None:
        output = self._golden.forward(hidden_states, with_head=self._step.runs_head)
        # A slice with layers sent the last layer's output by its hook; one with the embedding alone sends here.
        if self._step.passes_on and not self._step.layers:
            self._ranks.send(output, to=self._ranks.rank + 1)

    @contextmanager
    def _sending_output(self) -> Iterator[None]:
        """Send the last layer's output as soon as it has run, before anything is written."""
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

    def _write_later(self, layer: int, captured: Mapping[Site, torch.Tensor], device: torch.device) -> None:
        self._unwritten.append((layer, captured, device))

    def _write_layer(self, layer: int, captured: Mapping[Site, torch.Tensor], device: torch.device) -> None:
        # Another run may have taken the directory over, if rank 0 died. `nonce` names this run.
        refuse_other_owner(self._writer.directory, self._ranks.nonce)
        self._write_read_record()
        self._golden_writer.write_layer(layer, captured, device)
        if layer == 0:
            entry = self._stored_entry(0, Site.INPUT)
            self._ranks.publish(_LAYER_0_INPUT, encode(entry))

    def _write_model(
        self, captured: Mapping[ModelSite, torch.Tensor], hidden_states: torch.Tensor | None
    ) -> None:
        # Without layers, the head's input is this rank's own input.
        last_output = self._last_output if self._last_output is not None else hidden_states
        assert last_output is not None, "a head has something before it"
        captured = {ModelSite.EMBEDDING: self._read_embedding(), **captured}
        self._golden_writer.write_model(captured, hidden_states=last_output.cpu())

    def _read_embedding(self) -> torch.Tensor:
        """Read the first layer's input, once the rank of that layer has written it."""
        if 0 in self._writer.complete_layers:
            return self._read_stored(0, Site.INPUT)
        entry = decode(Entry, self._ranks.wait_for(_LAYER_0_INPUT))
        return read_shared(self._writer.directory, self._writer.manifest, entry)

    def _read_stored(self, layer: int, site: Site) -> torch.Tensor:
        """Read a site of a layer that was stored when the run began, by any rank."""
        return read_shared(self._writer.directory, self._writer.manifest, self._stored_entry(layer, site))

    def _stored_entry(self, layer: int, site: Site) -> Entry:
        entry = Capture(self._writer.directory, self._writer.manifest).entry(layer, site)
        assert entry is not None, f"{site} of layer {layer} is captured at every level"
        return entry


class _PublishedProgress:
    """A progress that publishes to all ranks which layers are done."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def advance(self, layer: int, *, num_bytes: int) -> None:
        """Publish the size of a layer that is written."""
        self._ranks.publish(_layer_key(layer), num_bytes)

    def skip(self, layer: int) -> None:
        """Publish nothing: all ranks know which layers are stored."""


@contextmanager
def _showing_progress(
    ranks: RankGroup, complete: Sequence[int], run: Run, progress: Progress
) -> Iterator[None]:
    """Show, on rank 0, the layers that all ranks publish, while the block runs and at its end."""
    if ranks.rank > 0:
        yield
        return
    unfinished = []
    for layer in run.span:
        if layer in complete:
            progress.skip(layer)
        else:
            unfinished.append(layer)

    def show() -> None:
        for layer in [layer for layer in unfinished if ranks.is_published(_layer_key(layer))]:
            unfinished.remove(layer)
            progress.advance(layer, num_bytes=ranks.wait_for(_layer_key(layer)))

    def watch() -> None:
        # A store that is lost ends the display alone: the run tells of it.
        with suppress(CannotRunError):
            while not ended.wait(_LOOK_S):
                show()

    ended = threading.Event()
    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    show()


def _layer_key(layer: int) -> str:
    return f"layer/{layer}"


def _read_earlier(folder: Path, empty: ReadRecord) -> ReadRecord:
    """Read the record of earlier attempts by the same plan and node as `empty`; return `empty` if there is none."""
    path = folder / f"{empty.node}.json"
    if not path.exists():
        return empty
    try:
        earlier = ReadRecord.read(path)
    except CannotRunError as error:
        logger.warning("Reads before this attempt are not counted: %s", error)
        return empty
    return earlier if earlier.plan == empty.plan and earlier.node == empty.node else empty


def _require_whole(manifest: Manifest, run: Run, directory: Path) -> None:
    missing = [f"layer {layer}" for layer in run.span if layer not in manifest.complete_layers]
    listed = {entry.site for entry in manifest.entries if entry.layer is None}
    missing += [str(site) for site in run.model_sites if str(site) not in listed]
    if missing:
        raise CaptureError(
            f"the ranks are done and {directory} is not whole",
            found=f"no {', no '.join(missing)}",
            next_step="Run the same command again: it resumes after the layers that are stored.",
        )
