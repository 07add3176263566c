"""Verification in words: a short summary, and the sections of the detailed log.

`mm2-split verify` shows all sections, `mm2-split fetch` those of the download, and a run a node's first and last.
Titles and labels were given word for word. Their `Shard` is a node's slice, not a file.
With `with_marks` lines begin with pictures. Without, `_MARKS` become words, and other pictures are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from minimax_tools.capture.read_record import ReadRecord
from minimax_tools.errors import list_faults, number_ranges, word_ranges
from minimax_tools.machine.size import format_size
from minimax_tools.model.architecture import Architecture
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.slices.download import Download, DownloadedFile, Repository, SharedFile
from minimax_tools.slices.verdicts import Holding, NodeVerification, SliceVerdict, read_over_slice
from minimax_tools.slices.verify import Verification, layers_read

# Pictures with the spaces after them. U+FE0F turns the sign before it into a picture.
_PICTURE = re.compile("[\U0001f000-\U0001faff\u2300-\u27bf\ufe0f]+ *")
_MARKS = {"✅": "[ok]", "❌": "[no]", "⏳": "[..]", "⚪": "[--]"}


def render_summary(verification: Verification, *, with_marks: bool) -> str:
    """Render one line for each node and each verdict."""
    lines = [
        f"{node.name}: {_describe_slice(node.slice, verification.plan)}, {format_size(node.slice_bytes)}, "
        f"{len(node.download.files)} of {_count_files(node.download.repository)} files "
        f"({'complete' if node.download.is_complete else 'not complete here'}){_describe_reads(node)}"
        for node in verification.nodes
    ]
    lines += _shared_lines(verification.shared_files)
    return _join_lines([*lines, *_verdict_lines(verification.verdicts)], with_marks=with_marks)


def render_details(verification: Verification, *, with_marks: bool) -> str:
    """Render all sections for each node, then the verdicts."""
    plan, model = verification.plan, verification.model
    lines: list[str] = []
    for node in verification.nodes:
        slice_, download = node.slice, node.download
        lines += [
            *_before_download(plan, slice_, download, model, node.slice_bytes),
            "",
            # A slice's own folder holds its tensors, so the repository's files are not needed.
            *_completion(slice_, download.files, model, is_needed=node.holding.folder is None),
            "",
            *_runtime(plan, slice_, model, node.record, node.layers, node.slice_bytes),
            *_folder(node.holding),
            "",
        ]
    shared = [*_shared_lines(verification.shared_files)]
    lines += [*shared, ""] if shared else []
    lines += ["🎯 === VERDICTS ===", *_verdict_lines(verification.verdicts)]
    return _join_lines(lines, with_marks=with_marks)


def render_download(
    plan: PartitionPlan, slice_: Slice, download: Download, *, model: str, slice_bytes: int, with_marks: bool
) -> str:
    """Render a node's first three sections, before its files are fetched; `slice_bytes` is its tensors' size."""
    return _join_lines([*_before_download(plan, slice_, download, model, slice_bytes)], with_marks=with_marks)


def render_completion(slice_: Slice, files: Sequence[DownloadedFile], *, model: str, with_marks: bool) -> str:
    """Render the section of a node's files after they were fetched."""
    return _join_lines([*_completion(slice_, files, model)], with_marks=with_marks)


def render_run(plan: PartitionPlan, node: str, *, record: ReadRecord | None = None, with_marks: bool) -> str:
    """Render a node's sections in a run: its part of the plan, and its reads if there is a record.

    Raises:
        UsageError: The plan has no such node, or mm2 does not know how its model names tensors.
    """
    slice_ = plan.slice_of(node)
    layers = layers_read(record, Architecture.of(plan.model_type))
    slice_bytes = sum(tensor.size_bytes for tensor in slice_.tensors)
    lines = [
        *_assignment(plan, slice_, plan.model),
        "",
        *_runtime(plan, slice_, plan.model, record, layers, slice_bytes),
    ]
    return _join_lines(lines, with_marks=with_marks)


def _before_download(
    plan: PartitionPlan, slice_: Slice, download: Download, model: str, slice_bytes: int
) -> Iterator[str]:
    yield from _assignment(plan, slice_, model)
    yield ""
    yield from _loading(slice_, download, model)
    yield ""
    yield from _download(download, slice_bytes)


def _assignment(plan: PartitionPlan, node_slice: Slice, model: str) -> Iterator[str]:
    yield "🎯 === NODE SLICE ASSIGNMENT VERIFICATION ==="
    yield f"🖥️  Node ID: {node_slice.node.name}"
    yield f"📊 Model: {model}"
    yield f"🧩 Total layers: {plan.num_hidden_layers}"
    yield f"🔗 Partition index: {plan.slices.index(node_slice)}"
    yield f"👥 Active nodes: {len(plan.used)}"
    yield ""
    yield "📋 COMPLETE PARTITION MAP:"
    for rank, slice_ in enumerate(plan.slices):
        layers = slice_.stage.layers
        # All nodes' memory is the line from 0 to 1. The nodes lie on it side by side, each as wide as its part of it.
        start, stop = plan.memory_weight(slice_)
        yield f"   {'✅' if slice_ is node_slice else '⏳'} Node {rank}: {slice_.node.name}"
        yield f"      Layers: {_format_layers(layers)} ({len(layers)} layers, {plan.share(slice_):.1%})"
        yield f"      Memory weight: [{start:.3f}, {stop:.3f})"
    assigned = sum(len(slice_.stage.layers) for slice_ in plan.slices)
    yield f"   Total layers assigned: {assigned} of {plan.num_hidden_layers}"
    yield ""
    yield "🎯 THIS NODE WILL LOAD:"
    yield f"   Model: {model}"
    yield f"   Layers: {_format_layers(node_slice.stage.layers)}"
    yield f"   Layer count: {len(node_slice.stage.layers)} / {plan.num_hidden_layers}"
    yield f"   Beside them: {_describe_ends(node_slice) or 'nothing'}"
    yield f"   Percentage: {plan.share(node_slice):.1%}"
    yield f"   Memory savings: {1 - plan.share(node_slice):.1%} reduction per node"


def _loading(slice_: Slice, download: Download, model: str) -> Iterator[str]:
    layers = slice_.stage.layers
    yield "📦 === SLICE LOADING VERIFICATION ==="
    yield f"🎯 Shard: {model} layers {_format_layers(layers)}"
    yield f"🖥️  Node: {slice_.node.name}"
    yield f"📊 Layer range: {_format_layers(layers)} ({len(layers)} layers)"
    yield f"🧩 Tensors: {len(slice_.tensors)}"
    yield f"🎯 Allow patterns: {list(download.patterns)}"


def _download(download: Download, slice_bytes: int) -> Iterator[str]:
    repository = download.repository
    yield "📥 === DOWNLOAD VERIFICATION ==="
    yield f"📁 Total files in repo: {_count_files(repository)}"
    yield f"🎯 Files after slice filtering: {len(download.files)}"
    yield f"💾 Full repo size: {_at_least(_megabytes(repository.size_bytes), is_known=repository.is_known)}"
    yield f"💾 This slice size: {_at_least(_megabytes(download.size_bytes), is_known=download.is_known)}"
    if download.reduction is None:
        yield "🎯 Size reduction: not known here"
    else:
        yield f"🎯 Size reduction: {_at_least(f'{download.reduction:.1%}', is_known=repository.is_known)}"
    yield f"🎯 Tensors of this slice alone: {_megabytes(slice_bytes)}"
    yield ""
    yield "📋 FILES FOR THIS SLICE:"
    for number, file in enumerate(download.files, start=1):
        size = "size not known here" if file.expected_bytes is None else _megabytes(file.expected_bytes)
        yield f"   {number:2}. 📄 {file.name} ({size})"


def _completion(
    slice_: Slice, files: Sequence[DownloadedFile], model: str, *, is_needed: bool = True
) -> Iterator[str]:
    """Yield the section DOWNLOAD COMPLETED; without `is_needed` a missing file is no fault."""
    is_complete = all(file.is_complete for file in files)
    status = "Complete" if is_complete else "Incomplete"
    if not is_complete and not is_needed:
        status += ", but not needed: the slice has its own folder"
    is_known = all(file.expected_bytes is not None for file in files)
    # `size_bytes` is `expected_bytes`, or where that is unknown `actual_bytes`, or else 0.
    expected = _megabytes(sum(file.size_bytes for file in files))
    yield f"{_mark(is_complete, is_needed)} === DOWNLOAD COMPLETED VERIFICATION ==="
    yield f"🎯 Shard: {model} layers {_format_layers(slice_.stage.layers)}"
    yield f"📁 Files downloaded: {sum(file.actual_bytes is not None for file in files)}"
    for file in files:
        actual = "not here" if file.actual_bytes is None else _megabytes(file.actual_bytes)
        if not file.is_complete and file.expected_bytes is not None:
            actual += f" of {_megabytes(file.expected_bytes)}"
        yield f"   📄 {file.name}: {actual} {_mark(file.is_complete, is_needed)}"
    yield ""
    yield "💾 DOWNLOAD SUMMARY:"
    yield f"   Expected: {_at_least(expected, is_known=is_known)}"
    yield f"   Actual:   {_megabytes(sum(file.actual_bytes or 0 for file in files))}"
    yield f"   Status:   {_mark(is_complete, is_needed)} {status}"


def _runtime(
    plan: PartitionPlan,
    slice_: Slice,
    model: str,
    record: ReadRecord | None,
    layers: Sequence[int] | None,
    slice_bytes: int,
) -> Iterator[str]:
    """Yield the section RUNTIME SLICE; `record` and `layers`, those that were read, are None before a run."""
    layers_shown = slice_.stage.layers if layers is None else layers
    yield "🚀 === RUNTIME SLICE VERIFICATION ==="
    yield f"🖥️  Node: {slice_.node.name}"
    yield f"📊 Model: {model}"
    yield f"🧩 {'Layers to be loaded' if layers is None else 'Loaded layers'}: {_format_layers(layers_shown)}"
    yield f"🎯 Layer count: {len(layers_shown)} / {plan.num_hidden_layers}"
    if record is None:
        yield "⏳ Nothing loaded yet: give a run's --records to see its reads"
        return
    yield f"📁 Tensors opened: {len(record.tensors)} of the slice's {len(slice_.tensors)}"
    yield f"💾 Bytes asked for: {record.bytes_asked}"
    again = f", and {record.bytes_read_again} again after it was resumed" if record.bytes_read_again else ""
    yield f"💾 Bytes read: {record.bytes_read}{again}"
    if slice_bytes:
        yield f"🎯 Bytes read over slice: {read_over_slice(record, slice_bytes):.2f}"


def _folder(holding: Holding) -> Iterator[str]:
    if holding.folder is None:
        return
    yield f"📁 Found in {holding.folder}: {len(holding.sizes)} tensors, {holding.size_bytes} bytes, each read once"
    if holding.digests:
        yield f"📋 Digests of {len(holding.digests)} tensors, each in --json; over all: sha256 {holding.digest}"


def _shared_lines(files: Sequence[SharedFile]) -> Iterator[str]:
    """Yield a line for each file that several nodes fetch."""
    for file in files:
        *others, last = file.nodes
        both = "both" if len(others) == 1 else "all"
        yield f"📄 {', '.join(others)} and {last} {both} fetch {file.name} ({_megabytes(file.size_bytes)})"


def _verdict_lines(verdicts: Sequence[SliceVerdict]) -> Iterator[str]:
    for verdict in verdicts:
        if verdict.holds is None:
            yield f"⚪ {verdict.name}: not judged: {list_faults(list(verdict.found))}"
        elif verdict.holds:
            yield f"✅ {verdict.name}: {verdict.claim}"
        else:
            yield f"❌ {verdict.name}: FALSE: {verdict.claim}: {list_faults(list(verdict.found))}"


def _describe_slice(slice_: Slice, plan: PartitionPlan) -> str:
    layers = slice_.stage.layers
    if not slice_.stage.is_used:
        return "idle"
    ends = _describe_ends(slice_)
    text = f"layers {_format_layers(layers)} ({len(layers)} of {plan.num_hidden_layers}"
    return f"{text}, {plan.share(slice_):.1%}){f' and {ends}' if ends else ''}"


def _describe_reads(node: NodeVerification) -> str:
    if node.record is None:
        return ""
    return f", {len(node.record.tensors)} tensors read {read_over_slice(node.record, node.slice_bytes):.2f} times"


def _describe_ends(slice_: Slice) -> str:
    embedding = "the embedding" if slice_.stage.has_embedding else ""
    head = "the final norm and the lm_head" if slice_.stage.has_head else ""
    return " and ".join(end for end in (embedding, head) if end)


def _format_layers(layers: Sequence[int]) -> str:
    """Render layers as `0-9`, with gaps as `0-3, 7`, and no layers as `none`."""
    return ", ".join(word_ranges(number_ranges(layers))) or "none"


def _count_files(repository: Repository) -> str:
    return _at_least(str(len(repository.sizes)), is_known=repository.is_listed)


def _at_least(figure: str, *, is_known: bool) -> str:
    return figure if is_known else f"at least {figure}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f} MB"


def _mark(is_complete: bool, is_needed: bool) -> str:
    return "✅" if is_complete else "❌" if is_needed else "⚪"


def _join_lines(lines: Sequence[str], *, with_marks: bool) -> str:
    return "\n".join(lines if with_marks else map(_without_pictures, lines))


def _without_pictures(line: str) -> str:
    for picture, word in _MARKS.items():
        line = line.replace(picture, word)
    return _PICTURE.sub("", line)
