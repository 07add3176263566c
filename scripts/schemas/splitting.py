"""Schemas of the outputs of mm2-split: checkpoints, plans, slices and their proof."""

from __future__ import annotations

from minimax_tools.partition.cost import PartCost
from minimax_tools.slices.download import DownloadedFile, SharedFile
from minimax_tools.slices.verdicts import SliceVerdict
from schemas.parts import Schema, by_name, flag, listed, maybe, number, record, text, whole
from schemas.values import schema_of

_LAYERS = listed(whole(), "First layer, and the layer after the last.")
_SHARE = number("Share of the model's layers, from 0 to 1.")
_PARTS = {
    "has_embedding": flag("Whether it holds the embedding."),
    "has_head": flag("Whether it holds the head."),
}


def synthesize() -> Schema:
    """Return the schema of `mm2-split synthesize`."""
    return record(
        {
            "folder": text("Folder of the checkpoint."),
            "num_tensors": whole(),
            "num_shards": whole(),
            "size_bytes": whole("Bytes of the tensors, without headers."),
        },
        "A checkpoint that was made.",
    )


def plan() -> Schema:
    """Return the schema of `mm2-split plan`."""
    node = {
        "node": text("Name of the node."),
        "memory_bytes": whole("Memory for its slice."),
        "tflops": maybe(number(), "Throughput in 10¹² operations a second; null if unknown."),
        "chosen_layers": maybe(_LAYERS, "Layers that were chosen by hand; null for other planners."),
        **_PARTS,
        "layers": _LAYERS,
        "cost": schema_of(PartCost),
        "files": listed(text(), "Files of the checkpoint that it reads."),
        "num_tensors": whole(),
        "share_of_layers": _SHARE,
        "memory_needed_bytes": whole("Memory that its slice takes."),
        "seconds_per_token": maybe(number(), "Time of its slice for one token; null if unknown."),
    }
    return record(
        {
            "model": text("The checkpoint."),
            "model_type": text("model_type of config.json."),
            "planner": text("Name of the planner."),
            "context_length": whole("Tokens in each row."),
            "batch_size": whole("Number of rows."),
            "dtype": text("Dtype of weights and activations in memory."),
            "num_hidden_layers": whole(),
            "shared": by_name(text(), "Tensors that several slices hold on purpose, with the reason."),
            "nodes": listed(record(node), "The nodes, in the order in which a token passes them."),
            "parts": by_name(schema_of(PartCost), "Costs of the parts of the model."),
            "layers": listed(schema_of(PartCost), "Costs of each layer."),
            "slowest_node": maybe(text(), "The node that bounds the pipeline; null if unknown."),
            "plan": maybe(text(), "File of the plan; null if none was written."),
        },
        "A model divided among machines.",
    )


def extract() -> Schema:
    """Return the schema of `mm2-split extract`."""
    part = {
        "node": text("Name of the node."),
        "folder": text("Folder of the slice."),
        # A plan of names does not say which parts of the model they are.
        "layers": maybe(_LAYERS),
        "has_embedding": maybe(flag(), "Whether it holds the embedding."),
        "has_head": maybe(flag(), "Whether it holds the head."),
        "num_tensors": whole(),
        "size_bytes": whole("Size of the slice in bytes."),
        "files": listed(text()),
        "is_new": flag("Whether it was written now."),
    }
    return record(
        {"plan": text("File of the plan, or of the plan of names."), "slices": listed(record(part))},
        "Slices cut out of a checkpoint.",
    )


def fetch() -> Schema:
    """Return the schema of `mm2-split fetch`."""
    return record(
        {
            "node": text("Name of the node."),
            "folder": text("Folder of the slice."),
            "files": listed(text()),
            "size_bytes": whole("Size of the files in bytes."),
        },
        "A slice fetched from a hub.",
    )


def verify() -> Schema:
    """Return the schema of `mm2-split verify`."""
    mapped = {
        "node": text("Name of the node."),
        "layers": _LAYERS,
        "num_layers": whole(),
        "share": _SHARE,
        "memory_weight": listed(
            {"type": "number"},
            "Start and end of its share of all memory, from 0 to 1.",
        ),
        **_PARTS,
    }
    verdict = schema_of(SliceVerdict)
    return record(
        {
            "model": text("The checkpoint."),
            "planner": text("Name of the planner."),
            "num_hidden_layers": whole(),
            "active_nodes": whole("Nodes that hold something."),
            "total_layers_assigned": whole(),
            "partition_map": listed(record(mapped), "All nodes of the plan."),
            "nodes": listed(_verified_node(), "Evidence about the nodes that were asked for."),
            "shared_files": listed(schema_of(SharedFile), "Weight files that several nodes fetch whole."),
            "verdicts": listed(verdict, "Claims about all nodes together."),
            "holds": flag("Whether no verdict fails."),
        },
        "The proof that each node loads its own slice.",
    )


def _verified_node() -> Schema:
    file = schema_of(DownloadedFile, is_complete=flag("Whether it is here with its size."))
    download = {
        "num_repository_files": whole(),
        "repository_bytes": whole(),
        "is_repository_known": flag(),
        "num_files": whole("Files that the slice needs."),
        "expected_bytes": maybe(whole()),
        "actual_bytes": maybe(whole()),
        "reduction": maybe(number(), "Share of the repository that is not downloaded."),
        "is_complete": maybe(flag()),
        "files": listed(file),
    }
    runtime = {
        "is_seen": flag("Whether there is a record of a run."),
        "loaded_layers": maybe(listed(whole()), "Layers that the run opened."),
    }
    reads = {
        "num_tensors": whole(),
        "bytes_asked": whole(),
        "bytes_read": whole(),
        "bytes_read_again": whole(),
        "bytes_read_over_slice": maybe(number(), "Bytes read as a ratio of the slice's; 1 is right."),
    }
    return record(
        {
            "node": text("Name of the node."),
            "partition_index": whole(),
            "layers": _LAYERS,
            "share": _SHARE,
            "memory_reduction": number("Share of the layers that the node does not hold."),
            "num_tensors": whole(),
            "slice_bytes": whole("Bytes of its planned tensors."),
            "allow_patterns": listed(text(), "Patterns of the files to download."),
            "download": record(download, "Files of the node."),
            "folder": maybe(text(), "Folder of its slice; null if none was given."),
            "source": maybe(text(), "The checkpoint that the slice was cut from."),
            "digest": maybe(text(), "Digest of all its tensors; null if none was read."),
            "digests": by_name(text(), "sha256 of each tensor."),
            "runtime": record(runtime),
            "reads": maybe(record(reads), "What a run read; null without a record."),
        }
    )
