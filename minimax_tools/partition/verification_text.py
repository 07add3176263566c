"""A verification in words: a short summary, and the sections of the verification's log in detail.

| section | what it shows of a node |
|---|---|
| NODE SLICE ASSIGNMENT | the map of all nodes, and what this one will load |
| SLICE LOADING | its layers, and the files that a download allows |
| DOWNLOAD | its files among the repository's, and their sizes |
| DOWNLOAD COMPLETED | each file, expected and actual |
| RUNTIME SLICE | the layers that were loaded, what was read for them |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from minimax_tools.errors import list_faults
from minimax_tools.partition.plan import Slice
from minimax_tools.partition.verdicts import Verdict, read_over_slice
from minimax_tools.partition.verify import NodeVerification, Verification
from minimax_tools.size import word_size

# Pictures, what turns a sign into one, and the space behind.
_PICTURE = re.compile("[\U0001f000-\U0001faff\u2300-\u27bf\ufe0f]+ *")
_MARKS = {"✅": "[ok]", "❌": "[no]", "⏳": "[..]", "⚪": "[--]"}


def render_summary(verification: Verification, *, with_marks: bool) -> str:
    """One line for each node and each verdict.

    Args:
        verification: What was found.
        with_marks: Whether pictures may stand before lines; else words where they mean something.
    """
    lines = [
        f"{node.slice.node.name}: {_describe_slice(node.slice, verification)}, {word_size(node.slice_bytes)}, "
        f"{len(node.download.files)} of {node.download.num_repository_files} files "
        f"({'complete' if node.download.is_complete else 'not complete here'}){_describe_reads(node)}"
        for node in verification.nodes
    ]
    return _finish([*lines, *_verdict_lines(verification.verdicts)], with_marks=with_marks)


def render_details(verification: Verification, *, with_marks: bool) -> str:
    """All sections for each node, then the verdicts; arguments as for `render_summary`."""
    lines = []
    for node in verification.nodes:
        lines += [
            *_assignment(node, verification),
            "",
            *_loading(node, verification),
            "",
            *_download(node),
            "",
            *_completion(node, verification),
            "",
            *_runtime(node, verification),
            "",
        ]
    lines += ["🎯 === VERDICTS ===", *_verdict_lines(verification.verdicts)]
    return _finish(lines, with_marks=with_marks)


def _assignment(node: NodeVerification, verification: Verification) -> Iterator[str]:
    plan, own = verification.plan, node.slice
    yield "🎯 === NODE SLICE ASSIGNMENT VERIFICATION ==="
    yield f"🖥️  Node ID: {own.node.name}"
    yield f"📊 Model: {verification.model}"
    yield f"🧩 Total layers: {plan.num_hidden_layers}"
    yield f"🔗 Partition index: {node.rank}"
    yield f"👥 Active nodes: {len(plan.used)}"
    yield ""
    yield "📋 COMPLETE PARTITION MAP:"
    for rank, (slice_, (start, stop)) in enumerate(verification.map):
        layers = slice_.stage.layers
        yield f"   {'✅' if slice_ is own else '⏳'} Node {rank}: {slice_.node.name}"
        yield (
            f"      Layers: {_range(layers)} ({len(layers)} layers, {_percent(verification.share(slice_))})"
        )
        yield f"      Memory weight: [{start:.3f}, {stop:.3f})"
    assigned = sum(len(slice_.stage.layers) for slice_, _ in verification.map)
    yield f"   Total layers assigned: {assigned} of {plan.num_hidden_layers}"
    share = verification.share(own)
    yield ""
    yield "🎯 THIS NODE WILL LOAD:"
    yield f"   Model: {verification.model}"
    yield f"   Layers: {_range(own.stage.layers)}"
    yield f"   Layer count: {len(own.stage.layers)} / {plan.num_hidden_layers}"
    yield f"   Beside them: {_ends(own) or 'nothing'}"
    yield f"   Percentage: {_percent(share)}"
    yield f"   Memory savings: {_percent(1 - share)} reduction per node"


def _loading(node: NodeVerification, verification: Verification) -> Iterator[str]:
    layers = node.slice.stage.layers
    yield "📦 === SLICE LOADING VERIFICATION ==="
    yield f"🎯 Shard: {verification.model} layers {_range(layers)}"
    yield f"🖥️  Node: {node.slice.node.name}"
    yield f"📊 Layer range: {_range(layers)} ({len(layers)} layers)"
    yield f"🧩 Tensors: {len(node.slice.tensors)}"
    yield f"🎯 Allow patterns: {list(node.download.patterns)}"


def _download(node: NodeVerification) -> Iterator[str]:
    download = node.download
    yield "📥 === DOWNLOAD VERIFICATION ==="
    yield f"📁 Total files in repo: {download.num_repository_files}"
    yield f"🎯 Files after slice filtering: {len(download.files)}"
    yield f"💾 Full repo size: {_megabytes(download.repository_bytes)}"
    yield f"💾 This slice size: {_megabytes(download.size_bytes)}"
    yield f"🎯 Size reduction: {_percent(download.reduction)}"
    yield f"🎯 Tensors of this slice alone: {_megabytes(node.slice_bytes)}"
    yield ""
    yield "📋 FILES FOR THIS SLICE:"
    for number, file in enumerate(download.files, start=1):
        yield f"   {number:2}. 📄 {file.name} ({_megabytes(file.size_bytes)})"


def _completion(node: NodeVerification, verification: Verification) -> Iterator[str]:
    download = node.download
    yield f"{_mark(download.is_complete)} === DOWNLOAD COMPLETED VERIFICATION ==="
    yield f"🎯 Shard: {verification.model} layers {_range(node.slice.stage.layers)}"
    yield f"📁 Files downloaded: {sum(file.actual_bytes is not None for file in download.files)}"
    for file in download.files:
        actual = "not here" if file.actual_bytes is None else _megabytes(file.actual_bytes)
        of = "" if file.is_complete else f" of {_megabytes(file.size_bytes)}"
        yield f"   📄 {file.name}: {actual}{of} {_mark(file.is_complete)}"
    yield ""
    yield "💾 DOWNLOAD SUMMARY:"
    yield f"   Expected: {_megabytes(download.size_bytes)}"
    yield f"   Actual:   {_megabytes(download.actual_bytes)}"
    yield f"   Status:   {_mark(download.is_complete)} {'Complete' if download.is_complete else 'Incomplete'}"


def _runtime(node: NodeVerification, verification: Verification) -> Iterator[str]:
    record, holding = node.record, node.holding
    yield "🚀 === RUNTIME SLICE VERIFICATION ==="
    yield f"🖥️  Node: {node.slice.node.name}"
    yield f"📊 Model: {verification.model}"
    loaded = "Loaded layers" if record is not None else "Layers to be loaded"
    yield f"🧩 {loaded}: {_numbers(node.layers)}"
    yield f"🎯 Layer count: {len(node.layers)} / {verification.plan.num_hidden_layers}"
    if record is None:
        yield "⏳ Nothing was loaded yet: give --records of a run, or --slices"
        return
    yield f"📁 Tensors opened: {len(record.tensors)} of the slice's {len(node.slice.tensors)}"
    yield f"💾 Bytes asked for: {record.bytes_asked}"
    yield f"💾 Bytes read: {record.bytes_read}"
    yield f"🎯 Bytes read over slice: {read_over_slice(record, node.slice_bytes):.2f}"
    for name, num_bytes in record.files.items():
        yield f"   📄 {name}: {num_bytes} bytes"
    if holding.folder is not None:
        yield f"📋 Digests of {len(holding.digests)} tensors, each in --json; over all: sha256 {holding.digest}"


def _verdict_lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    for verdict in verdicts:
        if verdict.holds is None:
            yield f"⚪ {verdict.name}: not judged: {list_faults(list(verdict.found))}"
        elif verdict.holds:
            yield f"✅ {verdict.name}: {verdict.claim}"
        else:
            yield f"❌ {verdict.name}: NOT SO that {verdict.claim}: {list_faults(list(verdict.found))}"


def _describe_slice(slice_: Slice, verification: Verification) -> str:
    layers = slice_.stage.layers
    if not slice_.stage.is_used:
        return "idle"
    ends = _ends(slice_)
    text = f"layers {_range(layers)} ({len(layers)} of {verification.plan.num_hidden_layers}"
    return f"{text}, {_percent(verification.share(slice_))}){f' and {ends}' if ends else ''}"


def _describe_reads(node: NodeVerification) -> str:
    if node.record is None:
        return ""
    return f", {len(node.record.tensors)} tensors read {read_over_slice(node.record, node.slice_bytes):.2f} times"


def _ends(slice_: Slice) -> str:
    ends = ["the embedding"] * slice_.stage.has_embedding
    ends += ["the final norm and the lm_head"] * slice_.stage.has_head
    return " and ".join(ends)


def _range(layers: range) -> str:
    return f"{layers.start}-{layers.stop - 1}" if layers else "none"


def _numbers(layers: Sequence[int]) -> str:
    """`0-9` where they follow each other, else `0-3, 7`."""
    runs: list[range] = []
    for layer in layers:
        if runs and runs[-1].stop == layer:
            runs[-1] = range(runs[-1].start, layer + 1)
        else:
            runs.append(range(layer, layer + 1))
    return ", ".join(map(_range, runs)) or "none"


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f} MB"


def _mark(holds: bool) -> str:
    return "✅" if holds else "❌"


def _finish(lines: Sequence[str], *, with_marks: bool) -> str:
    return "\n".join(lines if with_marks else map(_without_pictures, lines))


def _without_pictures(line: str) -> str:
    for picture, word in _MARKS.items():
        line = line.replace(picture, word)
    return _PICTURE.sub("", line)
