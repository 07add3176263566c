from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from minimax_tools.capture.manifest import Description
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import CaptureSource
from minimax_tools.capture.writer import open_capture
from minimax_tools.dumps.opening import open_source
from minimax_tools.errors import CaptureError
from minimax_tools.model.inputs import pad_rows
from minimax_tools.model.run import full_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.provenance import ModelFingerprint, Provenance
from reports.captures import capture_record, render_capture, render_statistics, statistics_record

SITES = (Site.INPUT, Site.Q_ROPE, Site.ROUTER_EXPERTS, Site.OUTPUT)


def layer_tensors(layer: int) -> dict[Site, torch.Tensor]:
    generator = torch.Generator().manual_seed(layer)
    tensors = {
        Site.INPUT: torch.randn(1, 6, 8, generator=generator).to(torch.bfloat16),
        Site.Q_ROPE: torch.randn(1, 2, 6, 4, generator=generator).to(torch.bfloat16),
        Site.ROUTER_EXPERTS: torch.arange(12).reshape(1, 6, 2),
        Site.OUTPUT: torch.randn(1, 6, 8, generator=generator).to(torch.bfloat16),
    }
    if layer:
        # As a golden does: the input is the output of the layer before.
        del tensors[Site.INPUT]
    return tensors


def write_capture(
    directory: Path,
    *,
    layers: int,
    stored: int | None = None,
    nan_in: int | None = None,
    hidden: bool = False,
) -> Capture:
    """A capture of a model of `layers` layers, the first `stored` of them written."""
    inputs = pad_rows(
        [list(range(6))], padding_side="right", buckets=(), pad_token_id=0, source="1 prompt, 6 tokens"
    )
    digests = dict.fromkeys(range(layers), "ab" * 32)
    description = Description(
        side="gpu_reference",
        run=full_run(layers, sites_level="all"),
        provenance=Provenance(
            model=ModelFingerprint(spec_digest="12" * 32, tensors_digest="34" * 32, layers=digests),
            model_source="MiniMaxAI/MiniMax-M2",
            backend="cuda",
            device="NVIDIA A100-SXM4-80GB",
            dtypes={"weights": "bfloat16", "router_gate": "float32"},
            target="transformers",
        ),
        inputs_digest=inputs.digest(),
        input_source=inputs.source,
        noise_floor="off",
    )
    with open_capture(directory, description, inputs=inputs) as writer:
        for layer in range(layers if stored is None else stored):
            tensors = layer_tensors(layer)
            if layer == nan_in:
                tensors[Site.Q_ROPE][0, 1, 2, 3] = torch.nan
            writer.write(layer, tensors, not_exposed=(Site.K_ROPE,) if hidden else ())
        if stored is None:
            writer.write(None, {ModelSite.LOGITS: torch.ones(1, 6, 16)})
            writer.finish()
    return Capture.open(directory)


class PlainSource(CaptureSource):
    """Tensors in a layout that has no manifest and says nothing of its origin."""

    layers = (0, 1)

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def sites(self, layer: int) -> tuple[Site, ...]:
        return tuple(site for site in SITES if site in layer_tensors(layer))

    def model_sites(self) -> tuple[ModelSite, ...]:
        return (ModelSite.EMBEDDING,)

    def read(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor:
        if layer is None:
            return torch.tensor([[1.0, torch.inf, 3.0]])
        return layer_tensors(layer)[site]

    def read_attention_mask(self) -> torch.Tensor | None:
        return None


def test_record_holds_the_run_and_every_site_in_execution_order(tmp_path: Path) -> None:
    record = capture_record(write_capture(tmp_path / "golden", layers=2, hidden=True))
    assert (record["directory"], record["complete"]) == (str(tmp_path / "golden"), True)
    assert record["description"]["run"]["name"] == "full_model"
    first, second = record["layers"]
    assert (first["layer"], second["layer"]) == (0, 1)
    assert [site["site"] for site in first["sites"]] == [str(site) for site in SITES]
    assert first["not_exposed"] == ["k_rope"]
    assert [(site["site"], site["mean"]) for site in record["model"]] == [("logits", 1.0)]
    output, values = first["sites"][-1], layer_tensors(0)[Site.OUTPUT].double()
    assert (output["shape"], output["dtype"]) == ([1, 6, 8], "bfloat16")
    assert output["mean"] == pytest.approx(float(values.mean()))
    assert (output["min"], output["max"]) == (float(values.min()), float(values.max()))
    # The input of a later layer is the output of the one before, under its own name.
    assert second["sites"][0] == {**output, "site": "input"}


def test_record_of_an_unfinished_capture_counts_a_nan_and_stays_json(tmp_path: Path) -> None:
    record = capture_record(write_capture(tmp_path / "golden", layers=4, stored=3, nan_in=1))
    assert record["complete"] is False
    assert [layer["layer"] for layer in record["layers"]] == [0, 1, 2]
    assert sum(site["num_nan"] for site in record["layers"][1]["sites"]) == 1
    json.dumps(record, allow_nan=False)


def test_source_without_manifest_is_measured(tmp_path: Path) -> None:
    record = capture_record(PlainSource(tmp_path))
    assert (record["description"], record["complete"]) == (None, None)
    golden = capture_record(write_capture(tmp_path / "golden", layers=2))
    assert record["layers"][0] == golden["layers"][0]
    assert (record["model"][0]["num_inf"], record["model"][0]["max"]) == (1, 3.0)


def test_golden_of_the_scripts_before_mm2_is_measured(tmp_path: Path) -> None:
    tensors = layer_tensors(0)
    torch.save(tensors[Site.INPUT], tmp_path / "embedding_output.pt")
    torch.save(tensors[Site.OUTPUT], tmp_path / "layer_0_output.pt")
    record = capture_record(open_source(tmp_path))
    golden = capture_record(write_capture(tmp_path / "golden", layers=1))
    expected = {site["site"]: site for site in golden["layers"][0]["sites"]}
    assert record["description"] is None
    assert record["layers"][0]["sites"] == [expected["input"], expected["output"]]
    assert "made by  unknown" in render_capture(open_source(tmp_path))


def test_unsaved_run_gives_the_same_statistics_as_a_saved_one(tmp_path: Path) -> None:
    saved = capture_record(write_capture(tmp_path / "golden", layers=1))
    unsaved = statistics_record({0: dict(reversed(layer_tensors(0).items()))})
    assert unsaved["layers"] == saved["layers"]
    assert unsaved["directory"] is None
    assert unsaved.keys() == saved.keys()


def test_unreadable_tensor_is_a_capture_error(tmp_path: Path) -> None:
    class Damaged(PlainSource):
        def read(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor:
            raise CaptureError(f"layer_{layer}.pt is damaged")

    with pytest.raises(CaptureError, match=r"layer_0\.pt is damaged"):
        capture_record(Damaged(tmp_path))


def test_words(tmp_path: Path, expect_text: Callable[[str, Mapping[str, str]], None]) -> None:
    few = write_capture(tmp_path / "few", layers=2, hidden=True)
    sources: dict[str, CaptureSource] = {
        "few layers": few,
        "many layers": write_capture(tmp_path / "many", layers=5, nan_in=3),
        "unfinished": write_capture(tmp_path / "part", layers=4, stored=3),
        "unknown origin": PlainSource(tmp_path / "plain"),
    }
    texts = {name: render_capture(source) for name, source in sources.items()}
    texts["unsaved"] = render_statistics({0: layer_tensors(0)})
    expect_text("captures.txt", {name: text.replace(f"{tmp_path}", "…") for name, text in texts.items()})
    lines = render_capture(few).splitlines()
    assert all(len(line) <= 80 and not line.endswith(" ") for line in lines[1:])
