"""JSON, YAML and TOML of any shape gives an error that names the file, and never a pass on a wrong value.

Each kind of file that mm2 reads is damaged in a small world (`hostile_world`), and the command that reads it is run.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from compare.cli import main as mm2_compare
from compare.diagnosis.cli import main as mm2_diagnose
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.manifest import Manifest
from minimax_tools.cli import mm2_split
from neuron.cli import main as mm2_test
from torture.hostile_cache_files import cache_files
from torture.hostile_file import REFUSED, HostileFile
from torture.hostile_model_files import model_files
from torture.hostile_run_files import run_files
from torture.hostile_world import HostileWorld, Outcome, run_command
from torture.mutations import Leniency, Mutation, mutate_randomly, mutate_systematically, mutate_whole
from torture.tally import Tally

_PROMISE = "a file of any shape gives a typed error that names it"
_LONGEST_S = 5.0
_NUM_RANDOM = 50
# The words of `console` for an exception that no code foresaw.
_UNEXPECTED = re.compile(r"unexpected [A-Z]\w*:")


# Keys of config.json that `mm2-split plan` does not use: those of the computation.
_UNPLANNED = (
    "architectures", "hidden_act", "rms_norm_eps", "rope_*", "attention_*", "use_*", "qk_norm*", "scoring_func",
    "*_token_id", "torch_dtype", "dtype", "transformers_version", "tie_word_embeddings", "sliding_window",
    "router_*", "*bias*", "quantization_config", "auto_map", "*_type*", "initializer_range", "output_*",
    "shared_*", "layernorm_*", "mtp*", "num_mtp*",
)  # fmt: skip


def run_hostile_json(scratch: Path, seed: int) -> Tally:
    """Damage every kind of file, and count the commands that do not refuse it as promised."""
    tally = Tally(promise=_PROMISE)
    world = HostileWorld.make(scratch / "world")
    draw = random.Random(seed)
    for file in hostile_files(world, scratch):
        whole = run_command(file.command, *file.words, folder=file.folder)
        tally.check(whole.exit_code == 0, f"{file.name}: whole: {whole.one_line}")
        for mutation in _mutations(file, draw):
            check_mutation(tally, file, mutation)
        tally.check(
            run_command(file.command, *file.words, folder=file.folder).exit_code == 0,
            f"{file.name}: not whole again after its mutations",
        )
    return tally


def check_mutation(tally: Tally, file: HostileFile, mutation: Mutation) -> None:
    """Damage a file, run its command, count the check, and restore the file."""
    content = file.path.read_bytes()
    file.path.write_bytes(file.pack(mutation.content))
    try:
        outcome = run_command(file.command, *file.words, folder=file.folder)
    finally:
        file.path.write_bytes(content)
    fault = find_fault(file, mutation, outcome)
    tally.check(fault is None, f"{file.name}: {mutation.description}: {fault}: {outcome.one_line}")


def find_fault(file: HostileFile, mutation: Mutation, outcome: Outcome) -> str | None:
    """Say how a command broke the promise; None if it kept it."""
    text = outcome.one_line
    if outcome.is_traceback or _UNEXPECTED.search(text) or "--debug for the traceback" in text:
        return "no typed error"
    if outcome.exit_code not in (0, 1, *REFUSED):
        return f"exit code {outcome.exit_code}"
    if outcome.seconds > _LONGEST_S:
        return f"{outcome.seconds:.1f} s"
    if mutation.must_be_refused and not file.may_pass and outcome.exit_code not in file.refused:
        return f"exit code {outcome.exit_code}, although the value is wrong"
    # A value of the right kind may name something else, such as a folder that is not there.
    is_of_the_file = mutation.must_be_refused or not _is_readable(file, mutation.content)
    names = (file.path.name, str(file.path.parent))
    if outcome.exit_code in file.refused and is_of_the_file and not any(name in text for name in names):
        return f"{file.path.name} is not named"
    return None


def _mutations(file: HostileFile, draw: random.Random) -> Iterator[Mutation]:
    content = file.read_text()
    if file.is_json:
        mutations = list(mutate_systematically(json.loads(content), file.leniency))
        yield from draw.sample(mutations, min(file.most_drawn or len(mutations), len(mutations)))
    yield from mutate_whole(content)
    yield from mutate_randomly(content, _NUM_RANDOM, draw)


def _is_readable(file: HostileFile, content: bytes) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return not file.is_json
    return True


def hostile_files(world: HostileWorld, scratch: Path) -> tuple[HostileFile, ...]:
    """Return every kind of file, with the command that reads it."""
    return (
        *_captures(world),
        *_checkpoints(world),
        *_plans(world, scratch),
        *_inputs(world, scratch),
        *_dumps(world, scratch),
        *_settings(world, scratch),
        *run_files(world, _make(scratch / "run_files")),
        *cache_files(Manifest.read(world.golden), _make(scratch / "cache_files")),
        *model_files(world, _make(scratch / "model_files")),
    )


def _captures(world: HostileWorld) -> Iterator[HostileFile]:
    judged = ("--golden", world.golden, "--run", world.run, "--model", world.model, "--quiet")
    optional = ("certificate", "run.decode_rows", "run.decodes_by_row", "floor_variants", "noise_floor")
    unread = (
        "run.first_site", "run.last_site", "certificate.passed",
        "provenance.options.*", "provenance.model_config.*", "provenance.port_config.*",
    )  # fmt: skip
    leniency = Leniency(
        unread=unread,
        optional=(
            *optional,
            "certificate.versions", "certificate.checks.*.figure", "certificate.checks.*.limit",
            "certificate.versions.*",
            "run.component", "run.model_sites", "not_exposed.*", "observed_dtypes.*", "text_digests.*",
            "provenance.target_digest", "provenance.options", "provenance.versions", "provenance.environment",
            "provenance.model_config", "provenance.port_config",
            "provenance.*.*",
        ),
        nullable=(
            "run.component", "certificate.checks.*.figure", "certificate.checks.*.limit", "entries.*.layer",
            "entries.*.statistics.*", "provenance.model.tensors_digest",
        ),
    )  # fmt: skip
    yield HostileFile(
        name="golden's manifest",
        path=world.golden / "manifest.json",
        command=mm2_compare,
        words=judged,
        leniency=leniency,
    )
    yield HostileFile(
        name="run's manifest",
        path=world.run / "manifest.json",
        command=mm2_test,
        words=("show", world.run, "--quiet"),
        leniency=leniency,
    )
    yield HostileFile(
        name="generation",
        path=world.golden / "generation.json",
        command=mm2_gpu,
        words=("show", world.golden, "--quiet"),
    )
    yield HostileFile(
        name="kept diagnosis",
        path=world.run / "diagnosis.json",
        command=mm2_diagnose,
        words=judged,
        may_pass=True,
        most_drawn=_NUM_RANDOM,  # each makes the file anew, which takes long
    )


def _checkpoints(world: HostileWorld) -> Iterator[HostileFile]:
    planned = ("plan", "--model", world.model, "--node", "a:memory=1GB", "--quiet")
    index = world.model / "model.safetensors.index.json"
    shard = next(iter(sorted(world.model.glob("*.safetensors"))))
    content = shard.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])

    def pack(header: bytes) -> bytes:
        return struct.pack("<Q", len(header)) + header + content[8 + length :]

    yield HostileFile(
        name="config",
        path=world.model / "config.json",
        command=mm2_split,
        words=planned,
        leniency=Leniency(unread=_UNPLANNED, optional=("*",), nullable=("*",)),
    )
    yield HostileFile(
        name="index", path=index, command=mm2_split, words=planned,
        leniency=Leniency(unread=("metadata.*",), optional=("metadata",), nullable=("metadata",)),
    )  # fmt: skip

    def unpack(stored: bytes) -> bytes:
        return stored[8 : 8 + length]

    yield HostileFile(
        name="header", path=shard, command=mm2_split, words=("memory", "--model", world.model, "--quiet"),
        pack=pack, unpack=unpack,
        leniency=Leniency(unread=("__metadata__.*",), optional=("__metadata__",), nullable=("__metadata__",)),
    )  # fmt: skip


def _plans(world: HostileWorld, scratch: Path) -> Iterator[HostileFile]:
    verified = ("verify", "--plan", world.plan, "--slices", world.slices, "--quiet")
    extracted = ("extract", "--plan", world.plan, "--node", "a", "--output", scratch / "slice", "--quiet")
    leniency = Leniency(optional=("slices.*.tflops",), nullable=("slices.*.tflops", "slices.*.chosen_layers"))
    yield HostileFile(
        name="plan verified", path=world.plan, command=mm2_split, words=verified, leniency=leniency
    )
    yield HostileFile(
        name="plan extracted",
        path=world.plan,
        command=mm2_split,
        words=extracted,
        leniency=replace(leniency, unread=_others_files(world)),
    )
    yield HostileFile(
        name="slice",
        path=world.slices / "a" / "slice.json",
        command=mm2_split,
        words=verified,
        refused=(1, 2, 3),
        leniency=Leniency(nullable=("layers", "has_embedding", "has_head", "tensors.*")),
    )
    nodes = _write(
        scratch / "nodes.json",
        [{"name": "a", "memory": "1GB", "tflops": 3.5}, {"name": "b", "memory": 10**9}],
    )
    yield HostileFile(
        name="nodes", path=nodes, command=mm2_split,
        words=("plan", "--model", world.model, "--nodes-file", nodes, "--quiet"),
        leniency=Leniency(
            optional=("*.tflops",), nullable=("*.tflops",), also=(("*.memory", "int"), ("*.memory", "str"))
        ),
    )  # fmt: skip
    weight_map = json.loads((world.model / "model.safetensors.index.json").read_text())["weight_map"]
    names = _write(scratch / "names.json", {"n1": {"layer_names": sorted(weight_map), "node_id": "n1"}})
    yield HostileFile(
        name="names", path=names, command=mm2_split,
        words=(
            "extract", "--model", world.model, "--plan-of-names", names, "--all-nodes", "--output", scratch / "named",
            "--quiet",
        ),
        leniency=Leniency(optional=("n1.node_id", "n1"), also=(("n1", "list"),)),
    )  # fmt: skip


def _others_files(world: HostileWorld) -> tuple[str, ...]:
    """Return the keys of a plan that are not read for node a alone."""
    slices = json.loads(world.plan.read_text())["slices"]
    return tuple(f"slices.{number}.files" for number, one in enumerate(slices) if one["node"] != "a")


def _inputs(world: HostileWorld, scratch: Path) -> Iterator[HostileFile]:
    swept = (
        *("single-layer", "--layer", 0, "--model", world.model, "--backend", "cpu", "--quiet", "--overwrite"),
        *("--random-input", "--max-length", 16, "--output-dir", scratch / "swept"),
    )
    ids = _write(scratch / "ids.json", [[1, 2, 3], [4, 5]])
    yield HostileFile(name="token ids", path=ids, command=mm2_test, words=(*swept, "--input-ids", ids))
    prompts = _write(scratch / "prompts.json", ["one", "two"])
    yield HostileFile(
        name="prompts", path=prompts, command=mm2_test, words=(*swept, "--prompts-file", prompts)
    )


def _dumps(world: HostileWorld, scratch: Path) -> Iterator[HostileFile]:
    nxdi, vllm = world.dump("nxdi"), world.dump("vllm-neuron")
    yield HostileFile(
        name="nxdi metadata", path=nxdi / "capture_metadata.json", command=mm2_test,
        words=("show", nxdi, "--quiet"),
        leniency=Leniency(unread=("capture_session", "tensors.*.step", "tensors.*.phase"),
            optional=("tensors.*",), nullable=("tensors.*.module_name", "tensors.*.tensor_type"),),
    )  # fmt: skip
    meta = next(vllm.rglob("*_meta.json"))
    yield HostileFile(
        name="vllm metadata", path=meta, command=mm2_test, words=("show", vllm, "--quiet"),
        leniency=Leniency(unread=("dp_rank",), also=(("req_ids.*", "int"),)),
    )  # fmt: skip
    template = (
        '{"sites": {"input_norm": {"from": "layers.{layer}.input_layernorm", "transpose": [0, 1, 2]}}, '
    )
    template += '"lengths": [9, 5], "padding": "right", "usual_names": true, "ranks": 1, "steps": ["1"]}'
    mapped = _write(scratch / "map.yaml", json.loads(template))
    yield HostileFile(
        name="map", path=mapped, command=mm2_test, words=("show", nxdi, "--map", mapped, "--quiet"),
        leniency=Leniency(
            optional=("*",), nullable=("*", "sites.*.transpose"),
            also=(("steps.*", "int"), ("steps.*", "list"), ("sites.*", "str"), ("sites.*.from", "list")),
        ),
    )  # fmt: skip


def _settings(world: HostileWorld, scratch: Path) -> Iterator[HostileFile]:
    judged = ("--golden", world.golden, "--run", world.run, "--model", world.model, "--quiet")
    limits = {
        "isolated": {"all": {"whole": 1.5}, "moe_delta": {"token_worst": 4.0}},
        "level": 0.05,
        "slack": 1.5,
    }
    criteria = _write(scratch / "criteria.yaml", limits)
    yield HostileFile(
        name="criteria", path=criteria, command=mm2_compare, words=(*judged, "--criteria", criteria),
        leniency=Leniency(optional=("*",)),
    )  # fmt: skip
    project = scratch / "project"
    project.mkdir(exist_ok=True)
    settings = project / "mm2.toml"
    settings.write_text('layer_timeout = 60\ndtype = "bfloat16"\ncriteria = "noise"\n')
    yield HostileFile(
        name="mm2.toml",
        path=settings,
        command=mm2_compare,
        words=judged,
        is_json=False,
        may_pass=True,
        folder=project,
    )


def _make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path
