"""Three-way comparison as vLLM Neuron's documents define it: a port, an exported BF16 golden, and a float32 one.

Of each module and token: the L2 distance of the port from float32, divided by that of BF16. 1 is as good as BF16. Its
plugin fails a port if any ratio is above 3, and above 6 in its examples of models with experts. The rule is rebuilt
from its documents: its own code was not run. T tokens, F channels.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from minimax_tools.capture.reader import Capture
from minimax_tools.dumps.opening import open_source
from minimax_tools.metrics.noise_floor import token_rows
from minimax_tools.model.sites import ModelSite, Site
from neuron.cli import main as mm2_test

REPOSITORY = Path(__file__).parents[3]
RIGHT = REPOSITORY / "scripts" / "examples" / "port.py"
WRONG = REPOSITORY / "tests" / "ports" / "one_wrong_layer.py"
ROUNDED = REPOSITORY / "tests" / "ports" / "planted.py"

NUM_DECODED = 2

Run = Callable[..., Path]
# Of a ratio, by default.
LIMIT = 3.0
# Modules of a layer that an engine's captures hold.
MODULES: Mapping[str, Site] = {
    "input_layernorm": Site.INPUT_NORM,
    "self_attn": Site.ATTN_DELTA,
    "post_attention_layernorm": Site.POST_NORM,
    "mlp.gate": Site.ROUTER_LOGITS,
    "mlp": Site.MOE_DELTA,
}


def write_engine_captures(directory: Path, source: Capture, *, num_decoded: int) -> None:
    """Write a chained run as the engine's captures, a folder for each prompt.

    Rows are packed [T,F] and padded to a bucket by NaN, positions by the last one. The last `num_decoded` tokens of
    each prompt have a pass of their own.
    """
    mask = source.read_attention_mask().bool()
    for prompt, is_real in enumerate(mask):
        num_prefilled = int(is_real.sum()) - num_decoded
        spans = [
            (0, num_prefilled),
            *((start, start + 1) for start in range(num_prefilled, int(is_real.sum()))),
        ]
        for number, (start, stop) in enumerate(spans):
            bucket = 64 if number == 0 else 2
            name = "prefill_s64_0" if number == 0 else f"decode_b2_{number - 1}"
            folder = directory / f"prompt_{prompt}" / "dp0" / name
            for module, values in _module_values(source):
                (folder / module).mkdir(parents=True)
                rows = values[prompt, is_real][start:stop]
                filler = rows.new_full((bucket - len(rows), rows.shape[1]), torch.nan)
                torch.save(torch.cat((rows, filler)), folder / module / "rank0.pt")
            positions = [*range(start, stop), *[stop - 1] * (bucket - (stop - start))]
            meta = {"req_ids": [f"{prompt}-x"], "positions": positions, "dp_rank": 0}
            (folder / f"{name}_meta.json").write_text(json.dumps(meta), encoding="utf-8")


def measure_ratios(report: Path, engine: Path, *, baseline: Path | None = None) -> dict[str, torch.Tensor]:
    """Measure the ratio of every token of all prompts, by module: float32, one value for each token.

    Args:
        report: What `mm2-gpu export --format vllm-neuron` wrote.
        engine: Captures of the port.
        baseline: Captures that stand in for the export's BF16 ones.
    """
    found = defaultdict(list)
    for prompt in sorted(folder.name for folder in engine.iterdir()):
        compare = report / "prompt_analysis" / prompt / "tensor_compare"
        modules = next((engine / prompt / "dp0").glob("prefill_*")).iterdir()
        for module in sorted(path.name for path in modules if path.is_dir()):
            exact = _tokens_by_position(compare / "hf_fp32", module, is_reference=True)
            if baseline is None:
                rounded = _tokens_by_position(compare / "hf_bf16", module, is_reference=True)
            else:
                rounded = _tokens_by_position(baseline / prompt, module, is_reference=False)
            port = _tokens_by_position(engine / prompt, module, is_reference=False)
            if not exact.keys() == port.keys() == rounded.keys():
                raise ValueError(f"{module}: the sides hold other tokens")
            for place, value in exact.items():
                error, noise = (port[place] - value).norm(), (rounded[place] - value).norm()
                found[module].append(float(error / noise) if noise else float("inf") if error else 0.0)
    return {module: torch.tensor(values) for module, values in found.items()}


def _module_values(source: Capture) -> Iterator[tuple[str, torch.Tensor]]:
    yield "model.embed_tokens", source.read(None, ModelSite.EMBEDDING)
    yield "lm_head", source.read(None, ModelSite.LOGITS)
    for layer in source.layers:
        for name, site in MODULES.items():
            yield f"model.layers.{layer}.{name}", token_rows(source.read(layer, site), site)


def _tokens_by_position(
    captures: Path, module: str, *, is_reference: bool
) -> dict[tuple[int, bool], torch.Tensor]:
    """Return each compared token [F] by its position, and whether it was decoded."""
    found = {}
    for folder in (captures / "dp0").iterdir():
        meta = json.loads((folder / f"{folder.name}_meta.json").read_text(encoding="utf-8"))
        rows = torch.load(folder / module / "rank0.pt", weights_only=True).float().flatten(0, -2)
        positions, is_decoded = meta["positions"], folder.name.startswith("decode")
        if is_decoded:
            found[max(positions), True] = rows[-1] if is_reference else rows[0]
            continue
        num_real = 1 + sum(later > earlier for earlier, later in pairwise(positions))
        tokens = range(num_real) if module != "lm_head" else [num_real - 1]
        found |= {(positions[token], False): rows[token] for token in tokens}
    return found


@pytest.fixture(scope="session")
def run_port(toy: Path, golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a port's layers in a chain and writes its captures as a serving engine does: `run(TARGET)`."""

    @cache
    def run(target: str) -> Path:
        folder = tmp_path_factory.mktemp("port")
        named = ["--model", str(toy), "--golden", str(golden), "--target", target]
        options = ["--backend", "cpu", "--output-dir", str(folder / "capture"), "--quiet"]
        result = CliRunner().invoke(mm2_test, ["full", *named, *options])
        assert result.exit_code in (0, 1), result.output
        source = Capture.open(folder / "capture")
        write_engine_captures(folder / "engine", source, num_decoded=NUM_DECODED)
        return folder / "engine"

    return run


def test_right_port_is_as_good_as_the_golden(report: Path, run_port: Run) -> None:
    found = measure_ratios(report, run_port(f"{RIGHT}:DecoderLayer"))
    assert len(found) == 4 * len(MODULES) + 2
    assert torch.all(found.pop("model.embed_tokens") == 0)
    for module, values in found.items():
        assert 0.85 < values.median() < 1.15, module
    of_layers = torch.cat([values for module, values in found.items() if ".layers." in module])
    # Where the port alone chooses another expert than float32 does, its ratio is far above any limit.
    assert (of_layers > LIMIT).float().mean() < 0.03


def test_mistake_is_seen_in_its_layer(report: Path, run_port: Run) -> None:
    found = measure_ratios(report, run_port(f"{WRONG}:SwappedGateUp_at_2"))
    assert found["model.layers.2.mlp"].median() > LIMIT
    assert (found["model.layers.2.mlp"] > LIMIT).float().mean() > 0.5
    for module in ("model.layers.2.self_attn", "model.layers.2.mlp.gate", "model.layers.1.mlp"):
        assert found[module].median() < 1.15, module


def test_baseline_with_a_rounded_router_is_seen_and_hides_the_mistake(report: Path, run_port: Run) -> None:
    rounded = run_port(f"{ROUNDED}:RoundedRouter")
    # It chooses other experts for many tokens, in the first layer already.
    assert (measure_ratios(report, rounded)["model.layers.0.mlp"] > LIMIT).float().mean() > 0.3
    wrong = run_port(f"{WRONG}:SwappedGateUp_at_2")
    own, hidden = measure_ratios(report, wrong), measure_ratios(report, wrong, baseline=rounded)
    assert hidden["model.layers.2.mlp"].median() < 2 < own["model.layers.2.mlp"].median() / 4
    assert hidden["lm_head"].median() < 1 < own["lm_head"].median() / 2


def test_mm2_passes_the_exported_golden(toy: Path, tmp_path: Path, make_pair: Any, command: Any) -> None:
    """An export of one prompt, judged as a port's dump."""
    from compare.cli import main as mm2_compare
    from gpu_reference.cli import main as mm2_gpu

    bfloat16, float32 = make_pair("--seq-len", 12, command=("extract-all",))
    named = ("--golden", bfloat16, "--float32-golden", float32, "--output-dir", tmp_path / "report")
    command(mm2_gpu, "export", "--format", "vllm-neuron", *named, "--allow-uncertified")
    dump = tmp_path / "report/prompt_analysis/prompt_0/tensor_compare/hf_bf16"
    result = command(mm2_compare, "--golden", bfloat16, "--run", dump, "--model", toy, "--json")
    assert json.loads(result.stdout)["verdict"] == "pass", result.output
    assert open_source(dump).layers == (0, 1, 2, 3)
