"""Right ports judged by their logits alone, on many goldens: none of them may fail.

    python scripts/bench_right_logits.py --goldens 100 --journal right.jsonl                  the tests' model
    python scripts/bench_right_logits.py --model models/learned_j --model models/learned_k --journal right.jsonl

A golden is one or two pieces of the model's held-out text, captured by transformers in one of its implementations. Each
port runs them as `mm2-test model`, `bisect --whole` and `prompts` do, and the functions of these commands judge its
logits. Most of a right port's tokens come to a fraction of their limit; those that were near another right model than
the exact one are counted as *flipped*. What the journal holds is not run again.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click.testing
import torch
from figures import Figure, benchmark_parser, print_figures

from compare.chains.stream_search import search_stream
from compare.prompts.logits_verdict import judge_logits
from compare.prompts.prompt_judge import PortLogits, PromptLimits
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.golden_logits.golden_rows import GoldenRows, captured_logits
from minimax_tools.golden_logits.logits_store import LogitsStore
from minimax_tools.model.spec import ModelSpec
from minimax_tools.results.results import Verdict
from minimax_tools.text.answered_prompts import split_rows
from minimax_tools.text.tokenizer import encode_texts
from neuron.devices.ranks import Ranks
from neuron.devices.runtime import open_runtime
from neuron.model_runs.model_executor import ModelExecutor
from neuron.model_runs.passes import plan_passes
from neuron.ports.targets import find_model_target
from neuron.prompt_runs.prompt_run import PromptRun
from neuron.replacement.stream import GoldenStream, ReplacedJudge, RowLogits
from neuron.replacement.whole_bisection import ReplacedPort
from neuron.runs.port_setup import ModelSetup

_TRAINED = Path(__file__).parents[1] / "tests" / "models" / "learned"
_PORTS = Path(__file__).parent / "whole_ports" / "implementations.py"
# Ports of transformers in its implementations, and mm2's example port.
RIGHT = {
    name: f"{_PORTS}:{name}" for name in ("TransformersSdpa", "TransformersEager", "TransformersBatched")
}
RIGHT["Model"] = str(Path(__file__).parent / "examples" / "model_port.py") + ":Model"
# Options of `mm2-gpu` for every second golden; the others have the default implementation.
_EAGER = ("--attn-implementation", "eager", "--experts-implementation", "eager")
_LENGTHS = (150, 300)
_DECODED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Verdict of one command on one port and golden."""

    model: str
    golden: int  # number of the golden, the seed of its text
    port: str
    command: str
    failed: bool
    excess: float  # the largest error in units of its limit
    num_flipped: int  # tokens near another right model than the exact one; each was wrong without it


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """A model, and a folder for its goldens and golden logits."""

    model: Path
    scratch: Path
    reader: CheckpointReader
    spec: ModelSpec

    def golden(self, number: int) -> Capture:
        """Make a golden, or open the one that was made."""
        directory = self.scratch / f"golden_{number}"
        if not directory.is_dir():
            rows = cut_rows(self.model, number)
            written = self.scratch / f"rows_{number}.json"
            written.write_text(json.dumps(rows), encoding="utf-8")
            words = ["extract-all", "--model", str(self.model), "--input-ids", str(written)]
            words += ["--sites", "layer", "--noise-floor", "off", "--output-dir", str(directory), "--quiet"]
            made = click.testing.CliRunner().invoke(mm2_gpu, [*words, *(_EAGER if number % 2 else ())])
            if made.exit_code:
                raise SystemExit(f"golden {number} of {self.model} could not be made: {made.stderr}")
        return Capture.open(directory)

    def goldens(self, captured: dict[tuple[int, ...], torch.Tensor]) -> GoldenRows:
        """Return the golden logits of the model, kept from port to port."""
        store = LogitsStore.open(self.scratch / "golden_logits", reader=self.reader, spec=self.spec)
        return GoldenRows(store=store, reader=self.reader, spec=self.spec, captured=captured)


def cut_rows(model: Path, seed: int) -> list[list[int]]:
    """Cut one row of 150 to 300 tokens out of a model's held-out text, and a second, shorter one every third time."""
    (tokens,) = encode_texts(model, [(model / "held_out.txt").read_text(encoding="utf-8")], chat=False)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for divisor in (1, 3)[: 2 if seed % 3 == 0 else 1]:
        length = int(torch.randint(*_LENGTHS, (1,), generator=generator)) // divisor
        start = int(torch.randint(len(tokens) - length, (1,), generator=generator))
        rows.append(tokens[start : start + length])
    return rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RightPort:
    """A right port in memory, judged on goldens."""

    name: str
    ground: Ground
    executor: ModelExecutor

    def judge(self, number: int) -> Iterator[Judged]:
        """Judge the port on one golden by all commands."""
        golden = self.ground.golden(number)
        stream = GoldenStream.open(
            golden, reader=self.ground.reader, spec=self.ground.spec, dtype=torch.bfloat16
        )
        passes = plan_passes(stream.inputs, _DECODED)
        port = ReplacedPort(self.executor, passes=passes, stream=stream)
        found = {
            "model": self._judge_model(golden, port.run(None)),
            "bisect --whole": self._judge_bisection(stream, port),
            "prompts": self._judge_prompts(golden),
        }
        for command, (failed, excess, num_flipped) in found.items():
            yield Judged(
                model=self.ground.model.name,
                golden=number,
                port=self.name,
                command=command,
                failed=failed,
                excess=excess,
                num_flipped=num_flipped,
            )

    def _judge_model(self, golden: Capture, rows: Sequence[RowLogits]) -> tuple[bool, float, int]:
        goldens = self.ground.goldens(captured_logits(golden))
        prompts = split_rows(golden.read_inputs().real_rows(), num_decoded=_DECODED)
        goldens.make([prompt.row for prompt in prompts])
        ports = [
            PortLogits(tokens=row.tokens, logits=goldens.read(prompt.row).measure(row.logits, row.tokens))
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        verdict = judge_logits(prompts, ports, goldens, through="all layers")
        return not verdict.is_right, verdict.excess, verdict.num_flipped

    def _judge_bisection(self, stream: GoldenStream, port: ReplacedPort) -> tuple[bool, float, int]:
        judge = ReplacedJudge(
            stream=stream,
            num_decoded=_DECODED,
            reader=self.ground.reader,
            folder=self.ground.scratch / "golden_logits",
        )
        search = search_stream(
            self.ground.spec.num_hidden_layers,
            lambda point: judge.judge(point, port.run(point)),
            reference="golden",
            target=self.name,
        )
        return search.verdict is Verdict.FAIL, max(run.excess for run in search.runs), 0

    def _judge_prompts(self, golden: Capture) -> tuple[bool, float, int]:
        prompts = split_rows(golden.read_inputs().real_rows(), num_decoded=_DECODED)
        run = PromptRun(
            prompts=tuple(prompts),
            spec=self.ground.spec,
            goldens=self.ground.goldens({}),
            padding_side="right",
            buckets=(),
            batch_size=len(prompts),
        )
        ranking = run.judge(dict(enumerate(run.run_batch(self.executor, prompts))), num_known=0)
        excess = max(result.excess for result in ranking.results) / PromptLimits().excess
        num_flipped = sum(result.num_flipped for result in ranking.results)
        return ranking.verdict is Verdict.FAIL, excess, num_flipped


def judge_model(
    model: Path, known: Sequence[Judged], *, numbers: range, num_ports: int, scratch: Path
) -> Iterator[Judged]:
    """Judge some ports, in turn, on each golden of a model; what is known is left out."""
    done = {(one.golden, one.port) for one in known if one.model == model.name and one.command == "prompts"}
    spec = ModelSpec.from_folder(model)
    with CheckpointReader(model) as reader, open_runtime("cpu", ranks=Ranks()) as runtime:
        ground = Ground(model=model, scratch=scratch, reader=reader, spec=spec)
        for turn, (index, (name, target)) in itertools.product(range(num_ports), enumerate(RIGHT.items())):
            setup = ModelSetup(
                target=find_model_target(target),
                spec=spec,
                model_source=str(model),
                folder=model,
                dtype=torch.bfloat16,
                sites=(),
            )
            with ModelExecutor(setup, runtime=runtime, reader=reader) as executor:
                port = RightPort(name=name, ground=ground, executor=executor)
                for number in numbers:
                    if (number + turn) % len(RIGHT) == index and (number, name) not in done:
                        yield from port.judge(number)


def read_journal(path: Path) -> list[Judged]:
    """Read the judgements made so far, of a file of JSON lines; there may be none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    judged = [Judged(**json.loads(line)) for line in lines]
    # A golden that was interrupted was judged again.
    return list({(one.model, one.golden, one.port, one.command): one for one in judged}.values())


def write_journal(path: Path, judged: Judged) -> None:
    """Add a judgement to the file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(judged)) + "\n")


def figures(judged: Sequence[Judged]) -> Iterator[Figure]:
    """Return how many goldens were judged, how many right ports failed, and how near they came to a limit."""
    yield Figure.plain("models", len({one.model for one in judged}))
    yield Figure.plain("goldens", len({(one.model, one.golden) for one in judged}))
    for command in ("model", "bisect --whole", "prompts"):
        part = [one for one in judged if one.command == command]
        yield Figure.plain(f"{command}: judgements", len(part))
        yield Figure.at_most(f"{command}: right ports that fail", sum(one.failed for one in part), 0)
        yield Figure.plain(f"{command}: largest share of a limit", max(one.excess for one in part))
    shown = [one for one in judged if one.command == "model"]
    yield Figure.plain("model: judgements with flipped tokens", sum(bool(one.num_flipped) for one in shown))


def main() -> int:
    """Judge all right ports and print the figures; 1 if one failed."""
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--model", type=Path, action="append", help="checkpoint with held-out text (default: the tests')"
    )
    parser.add_argument("--goldens", type=int, default=21, help="goldens of each model (default: 21)")
    parser.add_argument("--first", type=int, default=0, help="number of the first golden (default: 0)")
    parser.add_argument(
        "--ports", type=int, default=len(RIGHT), help="ports judged on each golden (default: all)"
    )
    parser.add_argument(
        "--journal", type=Path, required=True, help="file of the judgements, which it adds to"
    )
    arguments = parser.parse_args()
    judged = read_journal(arguments.journal)
    for model in arguments.model or [_TRAINED]:
        with tempfile.TemporaryDirectory() as scratch:
            for one in judge_model(
                model,
                tuple(judged),
                numbers=range(arguments.first, arguments.first + arguments.goldens),
                num_ports=arguments.ports,
                scratch=Path(scratch),
            ):
                judged.append(one)
                write_journal(arguments.journal, one)
    return print_figures("right_logits", list(figures(judged)), as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
