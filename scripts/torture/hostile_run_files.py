"""Files that runs write beside their captures, to be damaged: passes, read records, profiles, journals, logs, plans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from minimax_tools.capture.manifest import Description, Manifest
from minimax_tools.capture.passes import (
    PASSES_NAME,
    CacheChange,
    Choice,
    MisplacedLogits,
    ModelPasses,
    Repetition,
)
from minimax_tools.capture.read_record import RECORDS_FOLDER, ReadRecord
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.cli import mm2_split
from minimax_tools.json_codec import encode
from minimax_tools.model.span import Span
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.printable import SCHEMA_VERSION
from minimax_tools.results.probes import Chain, Probe
from neuron.commands.port_stages import StageLog, StageResult
from neuron.replacement.run_folder import PLAN_NAME, RunFolder, RunPlan
from neuron.runs.bisection import JOURNAL_NAME, open_journal
from neuron.runs.layer_run import LayerTimes
from neuron.runs.run_profile import LayerProfile, RunProfile
from torture.hostile_file import HostileFile, finding, reading
from torture.hostile_world import HostileWorld
from torture.mutations import Leniency

_MOST_DRAWN = 600  # a mutation takes 25 ms
_SPAN = Span(0, 2)
_STAGE = ("mm2-test", "sweep", "--model", "m2")


def run_files(world: HostileWorld, folder: Path) -> Iterator[HostileFile]:
    """Yield the files of runs, written into an empty folder."""
    yield _passes(folder)
    yield _read_record(world, folder)
    yield _profile(folder)
    yield _journal(world, folder / "journal")
    yield _stages(folder)
    yield _replacement(folder)


def _passes(folder: Path) -> HostileFile:
    passes = ModelPasses(
        num_passes=2,
        layer_calls=((0, 1), (0, 1)),
        cached_layers=(0, 1),
        cache_form="past_key_values",
        cache_shift=1,
        cache_changes=(
            CacheChange(layer=0, number=1, kind="keys", heads=(0,), places=((0, 3),), num_tokens=1),
        ),
        choices=(
            Choice(number=0, row=0, chosen=5, likeliest=6, behind=0.5, rank=1, columns=(2,), num_columns=4),
        ),
        misplaced=(MisplacedLogits(row=0, column=1, is_padding=False),),
        num_padded_logits=4,
        padded_logits_above=1.5,
        repetitions=(Repetition(number=0, row=1, difference=0.25),),
        classes={"self_attn": "Attention"},
        other_classes={"mlp": ("Mlp", "FusedMlp")},
    )
    path = folder / PASSES_NAME
    path.write_text(json.dumps(encode(passes)))
    return HostileFile(
        name="passes",
        path=path,
        command=reading(lambda: ModelPasses.read(folder)),
        leniency=Leniency(
            optional=(
                *("logits", "layer_calls", "cached_layers", "cache_form", "cache_shift", "cache_changes"),
                *("choices", "choices.*.column", "choices.*.is_padding", "misplaced", "num_padded_logits"),
                *("padded_logits_above", "repetitions", "repetitions.*.is_finite"),
                *("classes", "classes.*", "other_classes", "other_classes.*"),
            ),
            nullable=(
                *("choices.*.behind", "choices.*.column", "padded_logits_above"),
                *("classes", "other_classes"),
            ),
        ),
    )


def _read_record(world: HostileWorld, folder: Path) -> HostileFile:
    records = folder / RECORDS_FOLDER
    index = TensorIndex.from_folder(world.model)
    for slice_ in PartitionPlan.read(world.plan).used:
        sizes = {name: index[name].size_bytes for name in slice_.names}
        record = ReadRecord.of(slice_.node.name, sizes, bytes_read=sum(sizes.values()))
        path = record.write(records)
    return HostileFile(
        name="read record",
        path=path,
        command=mm2_split,
        words=("verify", "--plan", world.plan, "--records", folder, "--quiet"),
        leniency=Leniency(optional=("bytes_read_again", "plan")),
    )


def _profile(folder: Path) -> HostileFile:
    layer = LayerProfile(
        layer=0, started_s=0.5, times=LayerTimes(run_s=1.5), peak_host_bytes=1 << 20, peak_device_bytes=1
    )
    profile = RunProfile(
        backend="cpu",
        spec_digest="0" * 64,
        dtype="bfloat16",
        num_ranks=1,
        num_decoded=0,
        batch_size=2,
        sequence_length=16,
        layers=(layer,),
    )
    return HostileFile(
        name="profile",
        path=profile.write(folder),
        command=reading(lambda: RunProfile.read(folder).median_times),
        # The events are for the viewer of traces.
        leniency=Leniency(
            unread=("traceEvents", "displayTimeUnit"),
            optional=("mm2.layers.*.times.*",),
            nullable=("mm2.layers.*.peak_device_bytes",),
        ),
    )


def _journal(world: HostileWorld, folder: Path) -> HostileFile:
    description = Manifest.read(world.run).description
    chain = Chain(span=_SPAN, is_right=False, excess=3.5, visible=0.1, reason="the output")
    with open_journal(folder, description, is_anew=True) as journal:
        journal.probe(_SPAN, lambda: Probe(span=_SPAN, chains=(chain,)), what="a probe")
    return HostileFile(
        name="bisection's journal",
        path=folder / JOURNAL_NAME,
        command=finding(folder / JOURNAL_NAME, lambda: _find_probe(folder, description)),
        # A journal of another description is begun anew, whatever differs.
        leniency=Leniency(
            unread=(
                *("description.provenance.model_config.*", "description.provenance.port_config.*"),
                *("description.run.first_site", "description.run.last_site"),
            ),
            optional=("description.*",),
            nullable=("description.*",),
        ),
        most_drawn=_MOST_DRAWN,
    )


def _find_probe(folder: Path, description: Description) -> Probe | None:
    other = Probe(span=_SPAN, chains=())
    with open_journal(folder, description, is_anew=False) as journal:
        found = journal.probe(_SPAN, lambda: other, what="a probe")
    return None if found is other else found


def _stages(folder: Path) -> HostileFile:
    path = folder / "stages.json"
    stage = StageResult(
        name="sweep",
        command=" ".join(_STAGE),
        source_digest="0" * 64,
        exit_code=1,
        text="FAIL: layer 1\n",
        headline="FAIL: layer 1",
        record={"verdict": "fail", "next": ["mm2-diagnose"]},
        schema_version=SCHEMA_VERSION,
    )
    path.write_text(json.dumps([asdict(stage)]))

    def find() -> tuple[str, ...] | None:
        found = StageLog(folder).find("sweep", _STAGE, source_digest="0" * 64)
        return None if found is None else (*found.next_commands, found.text)

    return HostileFile(name="log of stages", path=path, command=finding(path, find))


def _replacement(folder: Path) -> HostileFile:
    plan = RunPlan(
        tool="nxdi",
        golden_digest="0" * 64,
        model_name="model",
        num_layers=2,
        hidden_size=8,
        vocab_size=32,
        num_decoded=1,
        bucket=16,
    )
    path = folder / PLAN_NAME
    path.write_text(json.dumps(encode(plan)))
    return HostileFile(
        name="plan of a replacement",
        path=path,
        command=reading(lambda: RunFolder.open(folder).plan.num_steps),
        leniency=Leniency(optional=("schema_version",)),
    )
