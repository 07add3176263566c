"""Schemas of goldens that travel: their publication, the cache, and the machines that make them."""

from __future__ import annotations

from gpu_reference.readiness.golden_way import GoldenWay, GpuMachine, Speeds
from minimax_tools.machine.finding import Level, MachineFinding
from minimax_tools.partition.model_memory import DtypeShare, PartMemory, Regrouping
from minimax_tools.remote.cache import CachedFolder
from schemas.parts import Schema, by_name, choice, flag, listed, maybe, record, text, whole
from schemas.values import schema_of


def publication() -> Schema:
    """Return the schema of `mm2-gpu publish`."""
    return record(
        {
            "directory": text("Folder or address of the golden."),
            "address": text("Address that it was put at."),
            "files": listed(text(), "Its files there, with the card README.md."),
            "size_bytes": whole("Size of the golden in bytes."),
            "num_put": whole("Files that were put now; the others were there already."),
            "certified": flag("Whether the golden is certified."),
        },
        "A golden at a remote address.",
    )


def cache() -> Schema:
    """Return the schema of `mm2-split cache`."""
    folder = schema_of(CachedFolder)
    folder["properties"] |= {
        "address": maybe(text(), "Address that it was fetched from, or goes to; null if unknown."),
        "removed": flag("Whether this command removed it."),
    }
    folder["required"] += ["address", "removed"]
    return record(
        {
            "directory": text("Folder of the cache."),
            "cleared": flag("Whether --clear was given."),
            "folders": listed(folder, "Those that were used last first."),
        },
        "What was fetched from remote addresses and is kept on this machine.",
    )


def readiness() -> Schema:
    """Return the schema of `mm2-gpu check`."""
    level = choice(*(level.value for level in Level), description="Importance.")
    row = {
        "machine": text("GPUs, and memory of the host."),
        "layers_on_gpus": whole("Layers that the GPUs hold beside activations."),
        "works": flag("Whether a golden can be made on it."),
        "way": text("Name of the way to take; empty if none works."),
        "options": listed(text(), "Options of mm2-gpu extract-all for it."),
    }
    return record(
        {
            "worst": level,
            "findings": listed(schema_of(MachineFinding, level=level)),
            "machine": schema_of(GpuMachine),
            "ways": listed(schema_of(GoldenWay), "Ways to make a golden on the machine."),
            "speeds": schema_of(Speeds),
            "configurations": listed(record(row), "Usual machines."),
        },
        "A machine, and the options that make a golden on it.",
    )


def memory() -> Schema:
    """Return the schema of `mm2-split memory`."""
    part = schema_of(PartMemory)
    regrouping = schema_of(Regrouping)
    return record(
        {
            "model": text("The checkpoint."),
            "from": choice("headers", "config.json", description="Source of the tensors' sizes."),
            "dtypes": listed(schema_of(DtypeShare), "Bytes by stored dtype, largest first."),
            "parts": by_name(part, "Parts of the model, layers as layer_0 and so on."),
            "total": part,
            "regrouping": maybe(regrouping, "Experts stacked by a port; null for a model without experts."),
        },
        "The bytes of a checkpoint, and what it takes in memory.",
    )
