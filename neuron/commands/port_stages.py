"""The stages of `mm2-test port`: each a command in a process of its own, with a log from which a later call goes on."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.capture.mirror import address_of
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.run_commands import golden_words
from minimax_tools.command_line.console import RECORD_VARIABLE, end_command, print_json, print_text, say
from minimax_tools.errors import CannotRunError, UsageError
from minimax_tools.json_codec import DecodeError, decode
from minimax_tools.machine.files import whole_file
from minimax_tools.machine.json_file import read_own_json
from minimax_tools.machine.stops import process_words, same_command
from minimax_tools.machine.streams import write
from minimax_tools.model.span import word_layers
from minimax_tools.printable import SCHEMA_VERSION
from minimax_tools.results.results import Untested, Verdict
from neuron.devices.ranks import Ranks
from neuron.options import name_port
from neuron.ports.targets import find_target
from neuron.ports.traced import PREFIX as COMPILED_PREFIX
from neuron.weight_trace.report import NOT_ALL_SEEN
from reports.wording import word_untested

logger = logging.getLogger(__name__)

_NAME_WIDTH = 9
# Commands of the stages that judge what the others leave out.
_JUDGES = ("mm2-test sweep", "mm2-test full")
_LOG_NAME, _RECORD_NAME = "stages.json", "stage.json"
# Exit codes of a stage that was carried out.
_KEPT = (0, 1)


def judge_in_stages(
    *,
    model: str,
    target: str,
    golden: Path | None,
    quick: bool,
    backend: str,
    tp_degree: int,
    dtype: torch.dtype,
    output_dir: Path,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Carry out the stages of a port, print each one's result, and end with the verdict's exit code."""
    if quick and golden is not None:
        raise UsageError(
            "--quick chooses the rows of a golden to make", found="--golden", next_step="Leave one out."
        )
    if golden is not None:
        # A folder that is none ends the command now, not behind the weights.
        Capture.open(golden)
    output_dir.mkdir(parents=True, exist_ok=True)
    named = name_port(target=target, backend=backend, dtype=dtype, ranks=Ranks(degree=tp_degree))
    source_digest = find_target(target).source_digest
    plan = _Plan(
        model=model, named=named, golden=golden, is_quick=quick, folder=output_dir, overwrites=overwrite
    )
    log = StageLog(output_dir)
    results: list[StageResult] = []
    while (stage := plan.next_stage(results)) is not None:
        results.append(_carry_out(log, stage, plan, source_digest=source_digest, as_json=as_json))
    # A port that was found wrong is wrong, whatever became of the stages that ask why.
    is_wrong = any(result.exit_code == 1 for result in results)
    exit_code = 1 if is_wrong else max(result.exit_code for result in results)
    last = results[-1]
    if last.is_carried_out:
        log.finish()
    verdict = Verdict.of_exit_code(exit_code)
    # A mended port is judged by the same command.
    again = (same_command("mm2-test"),) if exit_code == 1 else ()
    wrong_weights = _wrong_weights(results)
    advised = last.next_commands if last.is_carried_out else (last.command,)
    # Weights that explain all are mended first: nothing is searched.
    following = again if wrong_weights else tuple(dict.fromkeys((*advised, *again)))
    untested = _untested(results)
    if as_json:
        stages = [
            {
                "stage": result.name,
                "command": result.command,
                "exit_code": result.exit_code,
                "output": result.record,
            }
            for result in results
        ]
        record = {
            "verdict": str(verdict),
            "directory": str(output_dir),
            "untested": untested,
            "wrong_weights": wrong_weights or None,
            "stages": stages,
        }
        print_json(record, next_commands=following)
    else:
        cause = f": the weights are wrong: {wrong_weights}" if wrong_weights else ""
        lines = ["", f"{str(verdict).upper()}: {target}{cause}"]
        lines += [f"  {result.name:{_NAME_WIDTH}}  {_outcome(result)}" for result in results]
        if untested and exit_code == 0:
            lines += ["", word_untested(Untested(**one) for one in untested)]
        print_text("\n".join(lines), next_commands=following)
    end_command(exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """A finished stage."""

    name: str
    command: str  # a shell line
    source_digest: str  # sha256 of the port's source; empty for a stage that does not run it
    exit_code: int
    text: str  # what the command wrote to stdout
    headline: str  # the first line of its text, which holds its verdict
    record: dict[str, Any] | None  # its JSON; None if it left none
    schema_version: int  # of that JSON: a later mm2 may write another

    @property
    def is_carried_out(self) -> bool:
        """False for a stage that ended in an error."""
        return self.exit_code in _KEPT

    @property
    def next_commands(self) -> tuple[str, ...]:
        """The commands that the stage advises to run next."""
        try:
            return decode(_Advice, self.record).next
        except DecodeError:
            return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Advice:
    """The key of a command's JSON that holds the commands to run next."""

    next: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """The values that a command leaves beside its text."""

    headline: str = ""
    record: dict[str, Any] | None = None


class StageLog:
    """Finished stages of an unfinished call, in a folder: the next call goes on behind them.

    A finished call forgets the stages that ran the port. What a port does may change without a trace in its source,
    such as a file that it reads while it runs.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._record_path = folder / _LOG_NAME, folder / _RECORD_NAME
        self._finished = {result.name: result for result in _read(self._path)}

    def find(self, name: str, words: tuple[str, ...], *, source_digest: str) -> StageResult | None:
        """Return a stage that a former call finished; None if it did not, or with another command or source."""
        known = self._finished.get(name)
        asked = (shlex.join(words), source_digest, SCHEMA_VERSION)
        is_same = known is not None and (known.command, known.source_digest, known.schema_version) == asked
        return known if is_same else None

    def finish(self) -> None:
        """Forget the stages that ran the port."""
        self._finished = {name: result for name, result in self._finished.items() if not result.source_digest}
        self._write()

    def run(
        self, name: str, words: tuple[str, ...], *further: str, source_digest: str, is_shown: bool
    ) -> StageResult:
        """Run a stage to its end, and keep its result; one that could not be carried out runs again in the next call.

        `further` options do not count as another command. `is_shown` writes its text to stdout as it comes.
        """
        lines: list[str] = []
        self._record_path.unlink(missing_ok=True)
        with subprocess.Popen(
            process_words((*words, *further)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, RECORD_VARIABLE: str(self._record_path.absolute())},
        ) as process:
            assert process.stdout is not None, "stdout is a pipe"
            try:
                for line in process.stdout:
                    lines.append(line)
                    if is_shown:
                        write(line, ends_line=False)
            except BaseException:
                # Stopped, or the output cannot be written: the stage must not run on alone.
                process.terminate()
                raise
        left = _Left()
        if self._record_path.exists():
            left = decode(_Left, read_own_json(self._record_path))
            self._record_path.unlink()
        result = StageResult(
            name=name,
            command=shlex.join(words),
            source_digest=source_digest,
            exit_code=process.returncode,
            text="".join(lines),
            headline=left.headline,
            record=left.record,
            schema_version=SCHEMA_VERSION,
        )
        if result.is_carried_out:
            self._finished[name] = result
            self._write()
        return result

    def _write(self) -> None:
        with whole_file(self._path) as file:
            json.dump([asdict(stage) for stage in self._finished.values()], file, indent=1)


def _read(path: Path) -> tuple[StageResult, ...]:
    """Read the stages of a former call; () if there are none, or the file is damaged: then all run again."""
    if not path.exists():
        return ()
    try:
        results = decode(tuple[StageResult, ...], read_own_json(path))
    except (OSError, ValueError) as error:
        logger.warning("Starting anew: %s cannot be read (%s).", path, error)
        return ()
    return tuple(result for result in results if result.is_carried_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A stage to run."""

    name: str
    words: tuple[str, ...]  # its command
    further: tuple[str, ...] = ()  # options that make it no other command
    runs_port: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The stages of a port: what they run, and their order."""

    model: str
    named: tuple[str, ...]  # options that name the port, its device, dtype and ranks
    golden: Path | None  # None to make one
    is_quick: bool  # whether the golden to make has the short rows of --quick
    folder: Path
    overwrites: bool  # whether the golden to make replaces another one

    def has_golden(self) -> bool:
        """Decide whether the golden that a former call made is still there, whole, and of this checkpoint."""
        try:
            golden = Capture.open(self._made_golden)
            first = golden.description.run.span.start
            with CheckpointWeights(model=self.model).open_layer(first, golden):
                return golden.manifest.is_complete and golden.manifest.is_certified
        except (CannotRunError, UsageError):
            return False

    @property
    def _made_golden(self) -> Path:
        return self.folder / "golden"

    def next_stage(self, results: Sequence[StageResult]) -> _Stage | None:
        """Return the stage that comes after some; None if they are all, or the last could not be carried out."""
        if results and not results[-1].is_carried_out:
            return None
        finished = {result.name: result for result in results}
        return next((stage for stage in self._stages(finished) if stage.name not in finished), None)

    def _stages(self, finished: Mapping[str, StageResult]) -> Iterator[_Stage]:
        """Yield all stages; the last depends on the verdicts before. Weights that explain all are mended first."""
        golden, run = address_of(self.golden or self._made_golden), str(self.folder / "run")
        on_golden = ("--model", self.model, "--golden", golden)
        if self.golden is None:
            rows = ("--quick",) if self.is_quick else ()
            words = golden_words(self.model, *rows, "--certify", "--output-dir", golden)
            further = ("--overwrite",) if self.overwrites else ()
            yield _Stage(name="golden", words=words, further=further, runs_port=False)
        if not self.named[1].startswith(COMPILED_PREFIX):
            # The trace runs on the CPU.
            place = self.named.index("--backend")
            named = (*self.named[:place], *self.named[place + 2 :])
            yield _Stage(name="weights", words=("mm2-test", "weights", "--model", self.model, *named))
        # The last of these stages leaves its report.
        report = ("--report-path", str(self.folder / "report"))
        sweep = (*on_golden, *self.named, "--output-dir", run, "--overwrite", *report)
        yield _Stage(name="sweep", words=("mm2-test", "sweep", *sweep))
        if not finished["sweep"].exit_code:
            chain = ("--output-dir", str(self.folder / "chain"), "--overwrite", *report)
            yield _Stage(name="chain", words=("mm2-test", "full", *on_golden, *self.named, *chain))
        elif not _wrong_weights(finished.values()):
            sides = ("--model", self.model, "--golden", golden, "--run", run)
            yield _Stage(name="diagnosis", words=("mm2-diagnose", *sides, "--prove", *report))


def _wrong_weights(results: Iterable[StageResult]) -> str:
    """Return what is wrong with the weights, if their trace proved that nothing else is; else an empty text."""
    for result in results:
        if result.name == "weights" and result.exit_code == 1:
            faulty = [one for one in _inspections(result) if one["verdict"] == str(Verdict.FAIL)]
            findings = [finding for one in faulty for finding in one["findings"]]
            wrong = dict.fromkeys(one["text"] for one in findings if one["severity"] == "wrong")
            return "; ".join(wrong) if all(one["explains_all"] for one in faulty) else ""
    return ""


def _inspections(weights: StageResult) -> Sequence[dict[str, Any]]:
    """Return the record of each layer whose weights a stage traced: one of each kind of layer."""
    if weights.record is None:
        return ()
    inspections: Sequence[dict[str, Any]] = weights.record.get("groups") or (weights.record,)
    return inspections


def _carry_out(
    log: StageLog, stage: _Stage, plan: _Plan, *, source_digest: str, as_json: bool
) -> StageResult:
    is_quiet = as_json or not logger.isEnabledFor(logging.INFO)
    digest = source_digest if stage.runs_port else ""
    known = log.find(stage.name, stage.words, source_digest=digest)
    if not stage.runs_port and not plan.has_golden():
        known = None
    if not as_json:
        say(f"\n{stage.name}{'' if known is None else ' (done before)'}\n$ {shlex.join(stage.words)}")
    if known is not None:
        if not as_json:
            write(known.text, ends_line=False)
        return known
    further = (*stage.further, *(("--quiet",) if is_quiet else ()))
    return log.run(stage.name, stage.words, *further, source_digest=digest, is_shown=not as_json)


def _outcome(result: StageResult) -> str:
    """Return the outcome of a stage in a word, or with what its headline says of its verdict."""
    if not result.is_carried_out:
        return f"could not be carried out (exit code {result.exit_code})"
    if result.exit_code == 0 and result.name == "golden":
        return "made of the short rows of --quick" if "--quick" in result.command else "made"
    verdict, _, told = result.headline.partition(": ")
    if result.exit_code:
        return f"wrong: {told or 'see above'}"
    if verdict == str(Verdict.WARN).upper() and told:
        return f"right, with a warning: {told}"
    # A pass says how little it rests on.
    if NOT_ALL_SEEN in told:
        return f"right, as its output tells: {NOT_ALL_SEEN}"
    if result.name == "weights":
        # Those of the other layers are compared by the later stages.
        return f"right in {word_layers(sorted(one['layer'] for one in _inspections(result)))}"
    return f"right, {told}" if " only, " in told else "right"


def _untested(results: Sequence[StageResult]) -> list[dict[str, Any]]:
    """Return what each stage left out, but for what another stage tests."""
    found = [
        one
        for result in results
        for one in (result.record or {}).get("untested", [])
        if one["by"] not in _JUDGES
    ]
    # Two stages leave out the same, each with its own command for it: the first is enough.
    first: dict[str, dict[str, Any]] = {}
    for one in found:
        first.setdefault(one["what"], one)
    return list(first.values())
