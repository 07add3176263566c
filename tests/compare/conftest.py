"""Captures made of the toy's golden: device runs that repeat it but for what a test changes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import click.testing
import pytest
import torch
from safetensors.torch import load_file

from compare.catalogue.cached_attention import DecodedInputs
from compare.cli import main as mm2_compare
from compare.comparer import compare_captures
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.golden_weights import CheckpointWeights
from compare.sides.sides import Batch, Sides
from minimax_tools.capture.manifest import Description
from minimax_tools.capture.passes import PASSES_NAME, CachePair, ModelPasses
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import CaptureSource
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.capture.writer import CaptureWriter, open_capture
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.dumps.name_map import NameMap
from minimax_tools.dumps.opening import DumpReading, open_sides, open_source
from minimax_tools.json_codec import encode
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import Mode, Run, model_run, sweep_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.evaluation import Evaluation, with_given
from minimax_tools.reference.expert_pass import LayerWeights
from minimax_tools.results.results import Comparison
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]

# What becomes of a stored tensor; None where it is not stored.
Change = Callable[[torch.Tensor], torch.Tensor] | None
Changes = Mapping[tuple[int | None, Site | ModelSite], Change]
Judge = Callable[..., Comparison]

NUM_LAYERS = 4

RIGHT_PORT = Path(__file__).parents[2] / "scripts" / "examples" / "port.py"
PORTS = Path(__file__).parents[1] / "ports"


@dataclass(frozen=True, kw_only=True)
class Copyist:
    """Writes captures that repeat the golden's tensors.

    A device run that repeats the golden bit for bit has a ρ of 1 at every site.
    """

    source: Capture
    folder: Path

    def device_run(
        self,
        changes: Changes | None = None,
        *,
        run: Run | None = None,
        not_exposed: tuple[Site, ...] = (),
        observed_dtypes: Mapping[str, str] | None = None,
        describe: Callable[[Description], Description] = lambda description: description,
        inputs: Inputs | None = None,
        stop_before: int | None = None,
        name: str = "device",
    ) -> Path:
        """A device run, by default a sweep over all layers; it may stop before a layer."""
        run = run or sweep_run(Span(0, NUM_LAYERS), sites_level="all")
        golden, inputs = self.source.description, inputs or self.source.read_inputs()
        description = Description(
            side=DEVICE_SIDE,
            run=run,
            provenance=replace(golden.provenance, target="test", dtypes={"weights": "bfloat16"}),
            inputs_digest=inputs.digest(),
            input_source=f"golden {golden.run.name}",
        )
        with open_capture(self.folder / name, describe(description), inputs=inputs) as writer:
            for layer in run.span:
                if layer == stop_before:
                    break
                writer.write(
                    layer,
                    self._layer(run, layer, changes or {}, not_exposed),
                    not_exposed=not_exposed,
                    observed_dtypes=observed_dtypes,
                )
            if stop_before is None:
                self._finish(writer, run, changes or {})
        return self.folder / name

    def golden(
        self,
        changes: Changes | None = None,
        *,
        run: Run | None = None,
        noise_floor: str = "full",
        describe: Callable[[Description], Description] = lambda description: description,
        stop_before: int | None = None,
        name: str = "other_golden",
    ) -> Path:
        """Another golden: changed, of fewer layers or sites, or with less of the noise floor."""
        run = run or self.source.description.run
        description = describe(replace(self.source.description, run=run, noise_floor=noise_floor))
        inputs, folder = self.source.read_inputs(), self.source.directory
        with open_capture(self.folder / name, description, inputs=inputs) as writer:
            for layer in run.span:
                if layer == stop_before:
                    break
                twin, floor = (folder / f"layer_{layer}.{kind}.safetensors" for kind in ("fp32", "floor"))
                writer.write(
                    layer,
                    self._layer(run, layer, changes or {}, ()),
                    twin=_by_site(load_file(twin)) if noise_floor == "full" else None,
                    floor=load_file(floor) if noise_floor != "off" else None,
                )
            if stop_before is None:
                twin = folder / "model.fp32.safetensors"
                floor = load_file(folder / "model.floor.safetensors") if noise_floor != "off" else None
                self._finish(writer, run, changes or {}, twin if noise_floor == "full" else None, floor)
        return self.folder / name

    def _layer(
        self, run: Run, layer: int, changes: Changes, not_exposed: tuple[Site, ...]
    ) -> dict[Site, torch.Tensor]:
        """Return a layer's tensors; `input` only if it is not the output of the layer before."""
        repeats_output = run.mode is Mode.CHAINED and layer > run.span.start and Site.OUTPUT in run.sites
        stored = [
            site
            for site in run.sites
            if site not in not_exposed and not (site is Site.INPUT and repeats_output)
        ]
        tensors = {site: self.source.read(layer, site) for site in stored}
        return {
            site: change(tensor)
            for site, tensor in tensors.items()
            if (change := changes.get((layer, site), _same)) is not None
        }

    def _finish(
        self,
        writer: CaptureWriter,
        run: Run,
        changes: Changes,
        twin: Path | None = None,
        floor: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        tensors = {
            site: change(self.source.read(None, site))
            for site in run.model_sites
            if (change := changes.get((None, site), _same)) is not None
        }
        if tensors:
            exact = {ModelSite(name): tensor for name, tensor in load_file(twin).items()} if twin else None
            writer.write(None, tensors, twin=exact, floor=floor)
        writer.finish()


@pytest.fixture
def copyist(golden: Path, tmp_path: Path) -> Copyist:
    return Copyist(source=Capture.open(golden), folder=tmp_path)


@pytest.fixture(scope="module")
def shared_copyist(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Copyist:
    """A copyist whose captures serve all tests of a file."""
    return Copyist(source=Capture.open(golden), folder=tmp_path_factory.mktemp("captures"))


@pytest.fixture
def judge(golden: Path) -> Judge:
    """Judges a device run against the golden, or another one."""

    def run(
        target: Path,
        *,
        reference: Path = golden,
        pattern: str = "layer_*",
        criteria: str = "noise",
        model: Path | None = None,
    ) -> Comparison:
        return compare_captures(
            open_source(reference),
            open_source(target),
            criteria=Criteria(name=criteria, rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
            layer_pattern=pattern,
            weights=None if model is None else CheckpointWeights(model=str(model)),
        )

    return run


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _by_site(tensors: Mapping[str, torch.Tensor]) -> dict[Site, torch.Tensor]:
    return {Site(name): tensor for name, tensor in tensors.items()}


@pytest.fixture(scope="session")
def dumps(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    """`foreign_dumps.py`, which writes a capture's values as the other tools do."""
    return load_module(Path(__file__).parents[1] / "foreign_dumps.py")


@pytest.fixture(scope="session")
def runs(run_port: Callable[..., Path]) -> dict[str, Capture]:
    """The whole model on the example port, right and with gate and up swapped in layer 1."""
    targets = {"right": f"{RIGHT_PORT}:DecoderLayer", "swapped": "one_wrong_layer.py:SwappedGateUp_at_1"}
    return {name: Capture.open(run_port("full", target)) for name, target in targets.items()}


@pytest.fixture(scope="session")
def run_port(toy: Path, golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs a port of `tests/ports` once, or one at another path: `run_port("sweep", "planted.py:Name", *OPTIONS)`."""
    done: dict[tuple[str, ...], Path] = {}

    def run(name: str, target: str, *options: object) -> Path:
        asked = (name, target, *map(str, options))
        if asked not in done:
            folder = tmp_path_factory.mktemp("port") / "run"
            # A name without a file is a port of mm2's own; a whole path stays as it is.
            port = str(PORTS / target) if ".py:" in target else target
            arguments = [name, "--model", str(toy), "--golden", str(golden), "--target", port]
            arguments += ["--backend", "cpu", "--output-dir", str(folder), "--quiet", *asked[2:]]
            result = click.testing.CliRunner().invoke(mm2_test, arguments)
            assert result.exit_code in (0, 1), result.output
            done[asked] = folder
        return done[asked]

    return run


@pytest.fixture
def write(dumps: ModuleType, runs: dict[str, Capture], tmp_path: Path) -> Callable[..., Path]:
    """Writes a run as another tool does."""

    def write(tool: str, run: str = "right", name: str = "dump", **options: Any) -> Path:
        dumps.WRITERS[tool](tmp_path / name, runs[run], **options)
        return tmp_path / name

    return write


@pytest.fixture
def compare(golden: Path, command: Command, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Judges a dump against the golden: exit code and JSON; `text` is the map's."""

    def run(
        target: Path, text: str | None = None, *options: object, reference: Path = golden
    ) -> tuple[int, dict[str, Any]]:
        arguments = ["--golden", reference, "--run", target, "--json", "--quiet", *options]
        if text is not None:
            (tmp_path / "map.yaml").write_text(text)
            arguments += ["--run-map", tmp_path / "map.yaml"]
        result = command(mm2_compare, *arguments)
        return result.exit_code, json.loads(result.stdout)

    return run


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A dump laid out as the golden, of which every value is that of a run, bit for bit."""

    source: CaptureSource
    num_sites: int  # number of sites, counted in each layer, without the inputs of layers

    def told(self, words: str) -> bool:
        return any(words in note for note in self.source.notes)


@pytest.fixture
def reads_as(golden: Path, runs: dict[str, Capture], tmp_path: Path) -> Callable[..., Reading]:
    """Reads a dump, which must hold the values of a run on all real tokens; `text` is the map's."""

    def read(folder: Path, run: str = "right", text: str | None = None) -> Reading:
        (tmp_path / "map.yaml").write_text(text or "")
        names = NameMap.read(tmp_path / "map.yaml") if text else NameMap()
        reading = DumpReading(names=names)
        _, dump = open_sides(golden, folder, reference_reading=DumpReading(), target_reading=reading)
        own, batch = runs[run], Batch.of(runs[run], dump)
        keys = [(layer, site) for layer in dump.layers for site in dump.sites(layer)]
        for layer, site in keys:
            sides = (side.read(layer, site) for side in (dump, own))
            assert torch.equal(*(batch.rows(side, site) for side in sides)), (layer, site)
        for model_site in dump.model_sites():
            held = dump.held_tokens(model_site)
            rows = batch if held is None else Batch(held)
            sides = (side.read(None, model_site) for side in (dump, own))
            assert torch.equal(*(rows.rows(side, model_site) for side in sides)), model_site
        inputs = [layer for layer, site in keys if site is Site.INPUT]
        return Reading(source=dump, num_sites=len(keys) - len(inputs) + len(dump.model_sites()))

    return read


OpenLayer = Callable[..., Evaluation]
WritePort = Callable[..., Sides]
# Keys and values of a prompt's tokens, [2,K,n,D]; of all prompts, [2,B,K,S,D].
Entries = torch.Tensor
# From the right entries of a prompt, the number of prefilled ones, and the step: the entries that it attends to.
Read = Callable[[Entries, int, int], Entries]


@pytest.fixture(scope="session")
def open_layer(toy: Path) -> OpenLayer:
    """Opens layer 1 of the toy on random input, cut into more and smaller heads; the chosen tokens are decoded."""
    spec = replace(
        ModelSpec.from_folder(toy), num_attention_heads=16, num_key_value_heads=4, head_dim=32, rotary_dim=16
    )
    weights = LayerWeights(LayerTensors.open(CheckpointReader(toy), spec, 1, torch.bfloat16))

    def open_layer(
        mask: torch.Tensor, *, num_decoded: int, chunks: Sequence[Sequence[int]] = ()
    ) -> Evaluation:
        passes = ModelPasses(num_passes=1 + num_decoded, chunks=tuple(map(tuple, chunks)))
        numbers = passes.number_tokens(mask)
        inputs = DecodedInputs(
            graph=ModelGraph().layer(0),
            spec=spec,
            weights=weights,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            decode_start=mask.shape[1],
            numbers=numbers,
            caches={},
            padding={},
        )
        states = torch.randn(*mask.shape, spec.hidden_size, generator=torch.Generator().manual_seed(0))
        return Evaluation(
            inputs, with_given({Site.INPUT: states}), tokens=(numbers > 0).flatten().nonzero().flatten()
        )

    return open_layer


@pytest.fixture
def write_port(golden: Path, toy: Path, tmp_path: Path) -> WritePort:
    """Writes what a whole port shows of some layers, and what its caches hold; returns it beside the golden."""
    source = Capture.open(golden)

    def write(
        layers: Mapping[int, tuple[Mapping[Site, torch.Tensor], CachePair | None]],
        *,
        num_decoded: int = 2,
        **passes: Any,
    ) -> Sides:
        run = model_run(4, sites_level="all", num_decoded=num_decoded)
        description = replace(
            source.description, side=DEVICE_SIDE, run=run, noise_floor="off", floor_variants=()
        )
        cached = tuple(layer for layer, (_, cache) in layers.items() if cache is not None)
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        with open_capture(folder, description, inputs=source.read_inputs()) as writer:
            for layer, (tensors, cache) in layers.items():
                writer.write(layer, tensors, cache=cache)
            told = ModelPasses(num_passes=1 + num_decoded, cached_layers=cached, **passes)
            writer.write_json(PASSES_NAME, encode(told))
        target = Capture.open(folder)
        return Sides(
            reference=source,
            target=target,
            batch=Batch.of(source, target),
            criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
            weights=CheckpointWeights(model=str(toy)),
        )

    return write


@pytest.fixture(scope="session")
def stepped() -> Callable[..., torch.Tensor]:
    """Computes attention of decoded tokens [T,N·D] as a port does, prompt by prompt and step by step."""
    return _step


def _step(
    queries: torch.Tensor,
    right: Entries,
    mask: torch.Tensor,
    read: Read,
    *,
    num_decoded: int,
    past: Entries | None = None,
) -> torch.Tensor:
    """Let each decoded token attend to what it reads; `past` are cached entries, if they are not the right ones.

    Queries are [B,N,S,D], the mask [B,S]. A token's own entry is right.
    """
    contexts = []
    for row, is_real in enumerate(mask.bool()):
        own = right[:, row][:, :, is_real]
        held = own if past is None else past[:, row][:, :, is_real]
        num_prefilled = int(is_real.sum()) - num_decoded
        for step in range(1, num_decoded + 1):
            place = num_prefilled + step - 1
            seen = torch.cat((held[:, :, :place], own[:, :, place:]), dim=2)
            query = queries[row][:, is_real][:, place]
            keys, values = read(seen, num_prefilled, step).repeat_interleave(len(query) // len(own[0]), dim=1)
            scores = (keys @ query[..., None])[..., 0] * query.shape[-1] ** -0.5
            contexts.append((scores.softmax(-1)[..., None] * values).sum(1).flatten())
    return torch.stack(contexts)
