"""Pipeline: a golden capture by several ranks, each of which reads and runs one slice of a plan.

What overlaps. The batch goes from rank to rank whole: rows apart would be other matrix products, whose sums no library
promises to be the same bits (cuBLAS and oneDNN choose their kernels by the number of rows), and a golden is one
forward pass of transformers. So the layers' forward passes follow one another, and everything else goes on at once on
all ranks: a rank reads its slice while those before it compute, passes its hidden states on as soon as its last layer
has run, and only then measures noise floors, digests and writes. Of a single process's time let S be the share of the
forward passes, R that of reading, W that of floors and writing, and x the share of the layers that the first of two
ranks has. Then two ranks take max(x, 1 − x, S + W + x (R − W)): the second rank waits for the first one's reading and
forward pass, and writes last. An equal split makes that S + (1 − S) / 2; where floors and writing cost more than
reading, as they do unless they are switched off, the first rank should have more of the layers. A rank whose memory
does not hold its slice streams it instead, floors and all, and those behind it wait.

`torch.distributed.pipelining` has nothing for one whole batch: its schedules gain by interleaving micro-batches of it,
with all of a stage's weights in memory, and have no part for what is written between the layers.

All ranks write into one capture directory, which must be on a file system that all of them see. Each lists its layers
in a manifest of its own, for a run that resumes theirs, and tells rank 0 of them when it is done: files and manifest
are those of a single process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_reference.golden.golden import Golden
from gpu_reference.golden.recording import recording_layers, recording_model
from gpu_reference.golden.resumption import running_only
from gpu_reference.model.placement import watched_memory
from gpu_reference.pipeline.joint_start import Introduction, open_together
from gpu_reference.ranks.ranks import RankGroup
from gpu_reference.streaming.once_reader import OnceReader
from gpu_reference.streaming.streaming import StreamedModel, Streaming
from minimax_tools.capture.manifest import Entry, Manifest
from minimax_tools.capture.read_record import RECORDS_FOLDER, ReadRecord
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.sharing import read_shared, refuse_other_owner
from minimax_tools.capture.writer import CaptureWriter
from minimax_tools.command_line.progress import Progress
from minimax_tools.errors import CannotRunError, CaptureError
from minimax_tools.json_codec import decode, encode
from minimax_tools.model.run import Run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.weight_names import head_name
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.partition.planners import Stage

logger = logging.getLogger(__name__)

_FIRST_INPUT = "first_input"


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
    golden: Golden, ranks: RankGroup, plan: PartitionPlan, directory: Path, *, progress: Progress
) -> None:
    """Run the inputs once, this rank its slice of them, and write the capture; a killed capture resumes.

    Args:
        golden: Opened with this rank's slice.
        ranks: All of them, joined.
        plan: Theirs.
        directory: The capture directory, which all ranks see.
        progress: Told of every layer, on rank 0.

    Raises:
        CaptureError: The directory is in use or not shared, holds something else, or the disk is full.
        CannotRunError: The ranks would make different captures; or one of them died.
    """
    introduction = Introduction.of(golden, plan)
    with open_together(ranks, introduction, golden, directory) as writer:
        steps = plan_steps(
            [part.stage for part in plan.used], writer.complete_layers, has_model_sites=writer.has_model_sites
        )
        with _showing_progress(ranks, writer.complete_layers, golden.request.run, progress):
            rank_run = _RankRun(golden, ranks, writer, steps[ranks.rank], plan=introduction.plan)
            if not steps[ranks.rank].is_idle:
                rank_run.run()
            ranks.flush()
            parts = _gather_parts(ranks, writer.manifest)
        if ranks.rank == 0:
            ranks.settle()
            for part in parts:
                writer.add_part(part)
            _require_whole(writer.manifest, golden.request.run, directory)
            writer.finish()
    ranks.leave()


class _RankRun:
    """One rank's slice, run once."""

    def __init__(
        self, golden: Golden, ranks: RankGroup, writer: CaptureWriter, step: Step, *, plan: str
    ) -> None:
        self._golden = golden
        self._ranks = ranks
        self._writer = writer
        self._step = step
        streaming = golden.request.streaming
        assert streaming is not None, "a slice is streamed"
        assert streaming.part is not None, "a slice is part of a plan"
        self._streaming: Streaming = streaming
        self._golden_writer = golden.writing_to(writer, _ToldProgress(ranks))
        self._waiting: list[tuple[int, Mapping[Site, torch.Tensor], torch.device]] = []
        self._last_output: torch.Tensor | None = None
        self._records_folder = writer.directory / RECORDS_FOLDER
        self._earlier = ReadRecord.begun(streaming.part.node.name, plan=plan)
        if writer.complete_layers:
            self._earlier = _read_earlier(self._records_folder, self._earlier)

    def run(self) -> None:
        """Read, run, pass on, write."""
        step, streaming = self._step, self._streaming
        pending = tuple(layer for layer in step.layers if layer not in self._writer.complete_layers)
        self._expect_tied_head()
        if streaming.holds_part and isinstance(self._golden.weights, StreamedModel):
            self._golden.weights.hold(step.layers, with_head=step.runs_head)
        hidden_states = self._take()
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
        self._write_record()
        if step.runs_head:
            self._write_model(model_tensors, hidden_states)

    def _expect_tied_head(self) -> None:
        """Have one tensor that is embedding and head read once, where this rank needs it as both."""
        spec, reader = self._golden.request.model.spec, self._golden.reader
        if spec.tie_word_embeddings and self._step.runs_head and self._step.source == "tokens":
            assert isinstance(reader, OnceReader), "a slice is read once"
            reader.expect_again([head_name(spec)])

    def _write_record(self) -> None:
        """Write what was read of the checkpoint so far; before what was made of it is listed, so none is left out."""
        reader = self._golden.reader
        assert isinstance(reader, OnceReader), "a slice is read once"
        self._earlier.followed_by(reader.sizes_read, reader.bytes_read_by_name).write(self._records_folder)

    def _take(self) -> torch.Tensor | None:
        """The input [B,S,H] of the first layer to run; None where it is made of the tokens."""
        step, request = self._step, self._golden.request
        if step.source == "tokens":
            return None
        if step.source == "stored":
            return self._read_stored(step.layers.start - 1, Site.OUTPUT).to(self._streaming.device)
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
        refuse_other_owner(self._writer.directory, self._ranks.nonce)
        self._write_record()
        self._golden_writer.write_layer(layer, captured, device)
        if layer == 0:
            entry = self._stored_entry(0, Site.INPUT)
            self._ranks.say(_FIRST_INPUT, encode(entry))

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
        if 0 in self._writer.complete_layers:
            return self._read_stored(0, Site.INPUT)
        entry = decode(Entry, self._ranks.ask(_FIRST_INPUT))
        return read_shared(self._writer.directory, self._writer.manifest, entry)

    def _read_stored(self, layer: int, site: Site) -> torch.Tensor:
        """A site of a layer that was stored when the run began, on whichever machine."""
        return read_shared(self._writer.directory, self._writer.manifest, self._stored_entry(layer, site))

    def _stored_entry(self, layer: int, site: Site) -> Entry:
        entry = Capture(self._writer.directory, self._writer.manifest).entry(layer, site)
        assert entry is not None, f"{site} of layer {layer} is captured at every level"
        return entry


class _ToldProgress:
    """Tells all ranks which layers are done."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def advance(self, layer: int, *, num_bytes: int) -> None:
        """Tell of a layer that is written."""
        self._ranks.say(_layer_key(layer), num_bytes)

    def skip(self, layer: int) -> None:
        """Say nothing: all ranks know what is stored."""


@contextmanager
def _showing_progress(
    ranks: RankGroup, complete: Sequence[int], run: Run, progress: Progress
) -> Iterator[None]:
    """Show, on rank 0, what all ranks tell."""
    if ranks.rank > 0:
        yield
        return
    left = []
    for layer in run.span:
        if layer in complete:
            progress.skip(layer)
        else:
            left.append(layer)

    def show() -> None:
        for layer in [layer for layer in left if ranks.has_said(_layer_key(layer))]:
            left.remove(layer)
            progress.advance(layer, num_bytes=ranks.ask(_layer_key(layer)))

    ranks.on_look(show)
    try:
        yield
    finally:
        ranks.on_look(None)
    show()


def _layer_key(layer: int) -> str:
    return f"layer/{layer}"


def _read_earlier(folder: Path, own: ReadRecord) -> ReadRecord:
    """What attempts before this one read of the slice; `own`, which holds nothing, where none went by this plan."""
    path = folder / f"{own.node}.json"
    if not path.exists():
        return own
    try:
        earlier = ReadRecord.read(path)
    except CannotRunError as error:
        logger.warning("Reads before this attempt are not counted: %s", error)
        return own
    return earlier if earlier.plan == own.plan and earlier.node == own.node else own


def _gather_parts(ranks: RankGroup, own: Manifest) -> list[Manifest]:
    """Tell what this rank wrote; on rank 0, what all others wrote, once they are done."""
    if ranks.rank > 0:
        ranks.say(f"written/{ranks.rank}", encode(own))
        return []
    return [decode(Manifest, ranks.ask(f"written/{rank}")) for rank in range(1, ranks.num_ranks)]


def _require_whole(manifest: Manifest, run: Run, directory: Path) -> None:
    """Pass, or raise where a layer or a site outside the layers is listed by no rank."""
    missing = [f"layer {layer}" for layer in run.span if layer not in manifest.complete_layers]
    listed = {entry.site for entry in manifest.entries if entry.layer is None}
    missing += [str(site) for site in run.model_sites if str(site) not in listed]
    if missing:
        raise CaptureError(
            f"the ranks are done and {directory} is not whole",
            found=f"no {', no '.join(missing)}",
            next_step="Run the same command again: it resumes after the layers that are stored.",
        )
