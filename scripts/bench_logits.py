"""Whole ports that are judged by their logits alone, by mm2's commands: no right one may fail.

    python scripts/bench_logits.py --goldens 100 --journal logits.jsonl                        the tests' model
    python scripts/bench_logits.py --model models/learned_j models/learned_k --journal logits.jsonl
    python scripts/bench_logits.py --wrong wrong.py:Model                                      counts its prompts

A golden is one or two pieces of the model's held-out text, or random tokens where it has none, captured by transformers
in one of its implementations. Each golden is given to right ports in turn: transformers in several implementations, and
mm2's example. `model`, `bisect --whole` and `prompts` judge them; wrong ports of `--wrong` are judged by `prompts`
alone. What the journal holds is not run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click.testing
import torch
from faults.journal import Journal
from figures import Figure, benchmark_parser, print_figures
from peaks import package_environment

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.model.spec import ModelSpec
from minimax_tools.text.tokenizer import encode_texts
from neuron.cli import main as mm2_test

_SCRIPTS = Path(__file__).parent
_TRAINED = _SCRIPTS.parent / "tests" / "models" / "learned"
_BOXES = _SCRIPTS / "whole_ports" / "implementations.py"
# Right ports, and the commands that judge them by their logits alone: `model` does so where a port shows no layer, and
# `bisect --whole` replaces the stream between layers, which must show.
_SHOWN = [f"{_BOXES}:{name}" for name in ("TransformersSdpa", "TransformersEager", "TransformersBatched")]
_SHOWN.append(f"{_SCRIPTS / 'examples' / 'model_port.py'}:Model")
_HIDDEN = [f"{_BOXES}:Transformers{kind}BlackBox" for kind in ("", "Eager", "Batched")]
RIGHT = {
    **dict.fromkeys(_HIDDEN, ("model", "prompts")),
    **dict.fromkeys(_SHOWN, ("bisect", "prompts")),
}
# Options of `mm2-gpu` for every second golden; the others have the default implementation.
_EAGER = ("--attn-implementation", "eager", "--experts-implementation", "eager")
COMMANDS = ("model", "bisect", "prompts")
_LENGTHS = (150, 300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Answer of one command to one port on one golden."""

    model: str
    golden: int  # number of the golden, the seed of its text
    port: str
    is_right: bool
    command: str
    verdict: str
    excess: float = 0.0  # the largest error in units of its limit, or of noise; 0 where the command has none
    num_differing: int = 0  # prompts that differ
    num_prompts: int = 0


def draw_rows(model: Path, seed: int, *, number: int, lengths: tuple[int, int] = _LENGTHS) -> list[list[int]]:
    """Draw rows of tokens: pieces of the model's held-out text, or random ids where it has none."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(*lengths, (number,), generator=generator).tolist()
    held_out = model / "held_out.txt"
    if not held_out.is_file():
        vocab_size = ModelSpec.from_folder(model).vocab_size
        return [torch.randint(vocab_size, (size,), generator=generator).tolist() for size in sizes]
    (tokens,) = encode_texts(model, [held_out.read_text(encoding="utf-8")], chat=False)
    starts = [int(torch.randint(len(tokens) - size, (1,), generator=generator)) for size in sizes]
    return [tokens[start : start + size] for start, size in zip(starts, sizes, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """A model and a golden of it, on which whole ports are judged by commands."""

    model: Path
    golden: Path
    scratch: Path

    @classmethod
    def make(cls, model: Path, scratch: Path, command: str, *words: str, name: str) -> Ground:
        """Make a golden by a command of `mm2-gpu`."""
        golden = scratch / f"golden_{name}"
        line = [command, "--model", str(model), *words, "--output-dir", str(golden), "--quiet"]
        result = click.testing.CliRunner().invoke(mm2_gpu, line)
        if result.exit_code:
            raise SystemExit(f"golden {name} of {model} could not be made: {result.stderr}")
        return cls(model=model, golden=golden, scratch=scratch)

    @classmethod
    def of_rows(cls, model: Path, scratch: Path, rows: list[list[int]], *words: str, seed: int) -> Ground:
        """Make a golden of rows of tokens, named by their seed."""
        written = scratch / f"rows_{seed}.json"
        written.write_text(json.dumps(rows), encoding="utf-8")
        return cls.make(model, scratch, "extract-all", "--input-ids", str(written), *words, name=str(seed))

    def run(
        self,
        command: str,
        target: str,
        *words: str,
        backend: str = "cpu",
        variables: Mapping[str, str] | None = None,
        must_run: bool = True,
    ) -> Any:
        """Run a command of `mm2-test` on a port, and return its JSON.

        Raises:
            SystemExit: The port could not be judged; without `must_run` the JSON is an empty object then.
        """
        sides = ("--model", str(self.model), "--golden", str(self.golden), "--target", target)
        captures = ("--captures", str(self.scratch / "captures"), "--backend", backend)
        line = [command, *sides, *captures, *words, "--json", "--quiet"]
        if "--tp-degree" in words:
            # Ranks need a process of their own.
            started = [sys.executable, "-m", "neuron", *line]
            done = subprocess.run(
                started, env=package_environment(), capture_output=True, text=True, check=False
            )
            exit_code, stdout, stderr = done.returncode, done.stdout, done.stderr
        else:
            result = click.testing.CliRunner(env=variables).invoke(mm2_test, line)
            exit_code, stdout, stderr = result.exit_code, result.stdout, result.stderr
        if must_run and exit_code not in (0, 1):
            raise SystemExit(f"{target} could not be judged by {command}: {stderr}")
        return json.loads(stdout) if stdout.strip() else {}


def judge_port(ground: Ground, target: str, number: int) -> Iterator[Judged]:
    """Judge a right port by its commands, or a wrong one by `prompts` alone."""
    words = {"bisect": ("--whole", "--anew"), "prompts": ("--no-follow",)}
    for command in RIGHT.get(target, COMMANDS[-1:]):
        record = ground.run(command, target, *words.get(command, ()))
        prompts = record.get("prompts", ())
        errors = [run["error_of_limit"] for run in record.get("runs", ())]
        yield Judged(
            model=ground.model.name,
            golden=number,
            port=target.rpartition(":")[2],
            is_right=target in RIGHT,
            command=command,
            verdict=record["verdict"],
            excess=max(map(float, errors or [one["excess"] for one in prompts]), default=0.0),
            num_differing=record.get("num_differing", 0),
            num_prompts=len(prompts),
        )


def judge_golden(model: Path, number: int, targets: Sequence[str]) -> list[Judged]:
    """Make a golden of a model, and judge ports on it."""
    rows = draw_rows(model, number, number=2 if number % 3 == 0 else 1)
    words = ("--noise-floor", "off", *(_EAGER if number % 2 else ()))
    with tempfile.TemporaryDirectory() as scratch:
        ground = Ground.of_rows(model, Path(scratch), rows, *words, seed=number)
        return [one for target in targets for one in judge_port(ground, target, number)]


def give_figures(judged: Sequence[Judged]) -> Iterator[Figure]:
    """Yield how many right ports failed, how near they came to a limit, and how many prompts of wrong ones differ."""
    yield Figure.plain("goldens", len({(one.model, one.golden) for one in judged}))
    for command in COMMANDS:
        right = [one for one in judged if one.command == command and one.is_right]
        if right:
            yield Figure.plain(f"{command}: judgements", len(right))
            yield Figure.exactly(
                f"{command}: right ports that fail", sum(one.verdict == "fail" for one in right), 0
            )
            yield Figure.plain(f"{command}: largest error", max(one.excess for one in right))
    wrong = [one for one in judged if not one.is_right]
    for port in dict.fromkeys(one.port for one in wrong):
        own = [one for one in wrong if one.port == port]
        prompts = sum(one.num_prompts for one in own)
        yield Figure.plain(f"{port}: prompts flagged of {prompts}", sum(one.num_differing for one in own))
        yield Figure.exactly(f"{port}: passes", sum(one.verdict == "pass" for one in own), 0)


def main() -> int:
    """Judge the ports that the journal lacks, and print the figures; 1 if a right one failed."""
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--model", type=Path, nargs="+", default=[_TRAINED], help="checkpoints (default: the tests')"
    )
    parser.add_argument("--goldens", type=int, default=21, help="goldens of each model (default: 21)")
    parser.add_argument("--first", type=int, default=0, help="number of the first golden (default: 0)")
    parser.add_argument("--ports", type=int, default=1, help="right ports on each golden (default: 1)")
    parser.add_argument("--wrong", nargs="+", default=[], metavar="PATH.py:NAME", help="wrong ports")
    parser.add_argument("--journal", type=Path, help="file of the judgements, which it adds to")
    arguments = parser.parse_args()
    journal = Journal(arguments.journal, Judged)
    judged: list[Judged] = []
    for model in arguments.model:
        for number in range(arguments.first, arguments.first + arguments.goldens):
            right = [list(RIGHT)[(number + turn) % len(RIGHT)] for turn in range(arguments.ports)]
            judge = partial(judge_golden, model, number, (*right, *arguments.wrong))
            judged += journal.find_or_make(f"{model.name} {number}: {right} {arguments.wrong}", judge)
    return print_figures("logits", list(give_figures(judged)), as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
