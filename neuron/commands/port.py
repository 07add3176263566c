"""The command `mm2-test port`: a port judged in stages, from the golden to the proof of its mistake."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from minimax_tools.capture.mirror import address_of
from minimax_tools.command_line.console import Mm2Command, end_command, print_json, print_text
from minimax_tools.command_line.options import DEFAULT_CAPTURES, dtype_option, model_option, output_options
from minimax_tools.results.results import Verdict
from neuron.devices.ranks import Ranks
from neuron.options import backend_option, golden_option, name_port, target_option
from neuron.port_stages import StageLog, StageResult
from neuron.ports.targets import find_target
from neuron.ports.traced import PREFIX as COMPILED_PREFIX

logger = logging.getLogger(__name__)

_LENGTHS = "96,61"  # tokens of the golden's random prompts
_NAME_WIDTH = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A stage to run."""

    name: str
    words: tuple[str, ...]  # its command
    runs_port: bool = True


@click.command(
    "port",
    cls=Mm2Command,
    epilog="\b\nExample: mm2-test port --model DIR --target port.py:DecoderLayer",
)
@model_option
@target_option
@golden_option("Golden capture. Default: one is made, in the output folder.")
@backend_option
@click.option(
    "--tp-degree", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks that share a layer."
)
@dtype_option
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(DEFAULT_CAPTURES) / "port",
    show_default=True,
    help="Folder of the golden, the runs and the log of finished stages.",
)
@output_options
def port_command(
    *,
    model: str,
    target: str,
    golden: Path | None,
    backend: str,
    tp_degree: int,
    dtype: torch.dtype,
    output_dir: Path,
    as_json: bool,
) -> None:
    """Judge a port in stages: golden, weights, sweep, then its mistake named and proved, or all layers in a chain.

    Each stage is a command that is shown before it runs; the last leaves a report in the folder `report`. Finished
    stages are kept in the output folder: a later call goes on behind them. A changed port runs again; the golden stays.

    Exits with 1 if the port differs.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    named = name_port(target=target, backend=backend, dtype=dtype, ranks=Ranks(degree=tp_degree))
    source_digest = find_target(target).source_digest
    plan = _Plan(model=model, named=named, golden=golden, folder=output_dir)
    log = StageLog(output_dir)
    results: list[StageResult] = []
    while (stage := plan.next_stage(results)) is not None:
        results.append(_carry_out(log, stage, source_digest=source_digest, as_json=as_json))
    exit_code = max(result.exit_code for result in results)
    if as_json:
        print_json(
            {
                "verdict": str(_verdict(exit_code)),
                "directory": str(output_dir),
                "stages": [
                    {
                        "stage": result.name,
                        "command": result.command,
                        "exit_code": result.exit_code,
                        "output": result.record,
                    }
                    for result in results
                ],
            },
            next_commands=(results[-1].record or {}).get("next", ()),
        )
    else:
        lines = [f"{str(_verdict(exit_code)).upper()}: {target}"]
        lines += [f"  {result.name:{_NAME_WIDTH}}  {_word(result)}" for result in results]
        print_text("\n".join(["", *lines]), next_commands=())
    end_command(exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The stages of a port: what they run, and their order."""

    model: str
    named: tuple[str, ...]  # options that name the port, its device, dtype and ranks
    golden: Path | None  # None to make one
    folder: Path

    def next_stage(self, results: Sequence[StageResult]) -> _Stage | None:
        """Return the stage that comes after some; None if they are all, or the last could not be carried out."""
        if results and results[-1].exit_code not in (0, 1):
            return None
        finished = {result.name: result for result in results}
        open_stages = (stage for stage in self._stages(finished) if stage.name not in finished)
        return next(open_stages, None)

    def _stages(self, finished: Mapping[str, StageResult]) -> Iterator[_Stage]:
        """Yield all stages; the last depends on the sweep's verdict."""
        golden, run = address_of(self.golden or self.folder / "golden"), str(self.folder / "run")
        on_golden = ("--model", self.model, "--golden", golden)
        if self.golden is None:
            inputs = ("--model", self.model, "--seq-len", _LENGTHS, "--certify")
            words = ("mm2-gpu", "extract-all", *inputs, "--output-dir", golden)
            yield _Stage(name="golden", words=words, runs_port=False)
        if not self.named[1].startswith(COMPILED_PREFIX):
            # The trace runs on the CPU.
            named = _without(self.named, "--backend")
            yield _Stage(name="weights", words=("mm2-test", "weights", "--model", self.model, *named))
        # The last of these stages leaves its report.
        report = ("--report-path", str(self.folder / "report"))
        sweep = (*on_golden, *self.named, "--output-dir", run, "--overwrite", *report)
        yield _Stage(name="sweep", words=("mm2-test", "sweep", *sweep))
        if finished["sweep"].exit_code:
            sides = ("--model", self.model, "--golden", golden, "--run", run)
            yield _Stage(name="diagnosis", words=("mm2-diagnose", *sides, "--prove", *report))
        else:
            chain = ("--output-dir", str(self.folder / "chain"), "--overwrite", *report)
            yield _Stage(name="chain", words=("mm2-test", "full", *on_golden, *self.named, *chain))


def _without(words: Sequence[str], option: str) -> tuple[str, ...]:
    """Return an option line without an option and its value."""
    place = words.index(option)
    return (*words[:place], *words[place + 2 :])


def _carry_out(log: StageLog, stage: _Stage, *, source_digest: str, as_json: bool) -> StageResult:
    """Run a stage, or return the result that a former call kept."""
    is_quiet = as_json or not logger.isEnabledFor(logging.INFO)
    words = (*stage.words, *(("--json",) if as_json else ()), *(("--quiet",) if is_quiet else ()))
    digest = source_digest if stage.runs_port else ""
    known = log.find(stage.name, words, source_digest=digest)
    if not as_json:
        click.echo(f"\n{stage.name}{'' if known is None else ' (done before)'}\n$ {shlex.join(stage.words)}")
    if known is not None:
        if not as_json:
            click.echo(known.output, nl=False)
        return known
    return log.run(stage.name, words, source_digest=digest, is_shown=not as_json)


def _verdict(exit_code: int) -> Verdict:
    return next(
        (verdict for verdict in (Verdict.PASS, Verdict.FAIL) if verdict.exit_code == exit_code),
        Verdict.INCOMPARABLE,
    )


def _word(result: StageResult) -> str:
    """Return the outcome of a stage in a word or two."""
    if result.exit_code not in (0, 1):
        return f"could not be carried out (exit code {result.exit_code})"
    words = {"golden": ("made", ""), "diagnosis": ("nothing differs", "the port differs: see above")}
    return words.get(result.name, ("right", "wrong"))[result.exit_code]
