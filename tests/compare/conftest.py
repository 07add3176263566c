"""Captures made of the toy's golden: device runs that repeat it but for what a test changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import click.testing
import pytest
import torch
from safetensors.torch import load_file

from compare.cli import main as mm2_compare
from compare.comparer import compare_captures
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.capture.manifest import Description
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.capture.writer import CaptureWriter, open_capture
from minimax_tools.dumps.opening import open_source
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import Mode, Run, sweep_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import Span
from minimax_tools.results.results import Comparison
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]

# What becomes of a stored tensor; None where it is not stored.
Change = Callable[[torch.Tensor], torch.Tensor] | None
Changes = Mapping[tuple[int | None, Site | ModelSite], Change]
Judge = Callable[..., Comparison]

NUM_LAYERS = 4

# Gate and up swapped in layer 1, and there alone.
SWAPPED = """
import sys
sys.path.insert(0, {examples!r})
import port
import torch

class DecoderLayer(port.DecoderLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        state = super().convert_state_dict(tensors, config, layer_idx)
        if layer_idx == 1:
            gate, up = state["moe.gate_up_proj"].chunk(2, dim=1)
            state["moe.gate_up_proj"] = torch.cat((up, gate), dim=1)
        return state
"""
EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"


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
                writer.write_layer(
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
                writer.write_layer(
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
            site: change(self.source.read_model(site))
            for site in run.model_sites
            if (change := changes.get((None, site), _same)) is not None
        }
        if tensors:
            exact = {ModelSite(name): tensor for name, tensor in load_file(twin).items()} if twin else None
            writer.write_model(tensors, twin=exact, floor=floor)
        writer.finish()


@pytest.fixture
def copyist(golden: Path, tmp_path: Path) -> Copyist:
    return Copyist(source=Capture.open(golden), folder=tmp_path)


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
def runs(toy: Path, golden: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Capture]:
    """The whole model on the example port, right and with gate and up swapped in layer 1."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "swapped.py").write_text(SWAPPED.format(examples=str(EXAMPLES)))
    captures = {}
    for name, path in (("right", EXAMPLES / "port.py"), ("swapped", folder / "swapped.py")):
        arguments = ["full", "--model", str(toy), "--golden", str(golden), "--backend", "cpu", "--quiet"]
        arguments += ["--target", f"{path}:DecoderLayer", "--output-dir", str(folder / name)]
        result = click.testing.CliRunner().invoke(mm2_test, arguments)
        assert result.exit_code == (0 if name == "right" else 1), result.output
        captures[name] = Capture.open(folder / name)
    return captures


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
