"""vLLM Neuron's three-way comparison with mm2's exported goldens as its references, and with a rounded router's.

    python scripts/bench_three_way.py                    a drawn model, and the trained one of the tests
    python scripts/bench_three_way.py --model MODEL      another checkpoint

Ports: a right one, and one whose gate and up are swapped in one layer. References: goldens that `mm2-gpu export` wrote,
and a BF16 run whose router is rounded, as of a model that was cast to BF16 whole.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import click.testing
import torch
from figures import Figure, benchmark_parser, print_figures
from three_way import EXPERTS_LIMIT, LIMIT, measure_ratios, write_engine_captures

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.reader import Capture
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.cli import main as mm2_test

_TESTS = Path(__file__).parents[1] / "tests"
_RIGHT = Path(__file__).parent / "examples" / "port.py"
_LENGTHS, _NUM_DECODED = "48,33", 2


def main() -> int:
    """Measure and print; 1 if a goal is missed."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint (default: a drawn and a trained one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        models = {"drawn": scratch / "drawn", "trained": _TESTS / "models" / "learned"}
        if arguments.model is None:
            synthesize(
                models["drawn"],
                model=SyntheticModel(),
                dtype=torch.float8_e4m3fn,
                shard_size_bytes=None,
                seed=0,
            )
        else:
            models = {arguments.model.name: arguments.model}
        figures = [
            replace(figure, figure=f"{name}: {figure.figure}")
            for name, model in models.items()
            for figure in measure_model(model, scratch / f"{name}_runs")
        ]
    return print_figures("three_way", figures, as_json=arguments.json)


def measure_model(model: Path, scratch: Path) -> Iterator[Figure]:
    """Export goldens of a model, and compare ports with them."""
    for dtype in ("bfloat16", "float32"):
        words = ["--model", model, "--seq-len", _LENGTHS, "--dtype", dtype, "--certify"]
        _run(mm2_gpu, "extract-all", *words, "--output-dir", scratch / dtype)
    report = scratch / "report"
    sides = ["--golden", scratch / "bfloat16", "--float32-golden", scratch / "float32"]
    words = ["--format", "vllm-neuron", *sides, "--decode", _NUM_DECODED, "--output-dir", report]
    _run(mm2_gpu, "export", *words)
    last = ModelSpec.from_folder(model).num_hidden_layers - 1
    targets = {
        "right": f"{_RIGHT}:DecoderLayer",
        "wrong": f"{_TESTS / 'ports' / 'one_wrong_layer.py'}:SwappedGateUp_at_{last}",
        "rounded": f"{_TESTS / 'ports' / 'rounded_router.py'}:DecoderLayer",
    }
    engines = {name: _run_port(target, model, scratch, name=name) for name, target in targets.items()}

    ratios = measure_ratios(report, engines["right"])
    of_layers = {module: values for module, values in ratios.items() if ".layers." in module}
    medians = [float(values.median()) for values in of_layers.values()]
    yield Figure.at_least("right port, exported: smallest median of a module", min(medians), 0.85)
    yield Figure.at_most("right port, exported: largest median of a module", max(medians), 1.15)
    tokens = torch.cat(list(of_layers.values()))
    for limit in (LIMIT, EXPERTS_LIMIT):
        yield Figure.plain(
            f"right port, exported: % of tokens above {limit:g}", 100 * float((tokens > limit).float().mean())
        )
    swapped = f"model.layers.{last}.mlp"
    for name, baseline in (("exported", None), ("rounded router", engines["rounded"])):
        right = measure_ratios(report, engines["right"], baseline=baseline)[swapped]
        wrong = measure_ratios(report, engines["wrong"], baseline=baseline)[swapped]
        yield Figure.plain(f"{name}: median at the wrong layer, right port", float(right.median()))
        yield Figure.plain(f"{name}: median at the wrong layer, wrong port", float(wrong.median()))
    first = measure_ratios(report, engines["rounded"])["model.layers.0.mlp"]
    yield Figure.plain(
        f"rounded router, exported: % of tokens above {LIMIT:g} in layer 0",
        100 * float((first > LIMIT).float().mean()),
    )


def _run_port(target: str, model: Path, scratch: Path, *, name: str) -> Path:
    words = ["--model", model, "--golden", scratch / "bfloat16", "--target", target, "--backend", "cpu"]
    _run(mm2_test, "full", *words, "--output-dir", scratch / name)
    engine = scratch / f"{name}_engine"
    write_engine_captures(engine, Capture.open(scratch / name), num_decoded=_NUM_DECODED)
    return engine


def _run(command: click.Command, *words: object) -> None:
    result = click.testing.CliRunner().invoke(command, [*map(str, words), "--quiet"])
    if result.exit_code not in (0, 1):
        raise SystemExit(f"{' '.join(map(str, words))} failed: {result.output}")


if __name__ == "__main__":
    sys.exit(main())
