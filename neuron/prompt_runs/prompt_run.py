"""PromptRun: runs a port over prompts with their answers, in batches, and judges each prompt.

A batch has one prefill of its prompts, then a step for each token of the longest answer. The tokens that a step feeds
are those of the answer, whatever the port would choose (teacher forcing). A prompt whose answer has ended goes on with
its last token; nothing of that is judged. A killed run continues after its last whole batch.

A prompt that differs is followed to the first wrong pass and layer by two commands, run as child processes: `mm2-gpu
full` makes its golden (extra `golden`), `mm2-test model` runs and judges the port. Each can be repeated by hand.
B prompts of a batch, s columns of a pass, P columns of the cache, t judged tokens of a prompt, K candidates.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file

from compare.prompts.prompt_judge import NoiseLevel, PortLogits, PromptJudge
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CannotRunError, CaptureError, IncomparableError, TargetError
from minimax_tools.golden_logits.golden_logits import LOGITS_FIELDS, GoldenLogits, TokenLogits, join_tokens
from minimax_tools.golden_logits.golden_rows import GoldenRows
from minimax_tools.json_codec import encode
from minimax_tools.machine.files import whole_capture_file, whole_file
from minimax_tools.machine.json_file import parse_json
from minimax_tools.machine.progress import Progress
from minimax_tools.machine.stops import run_child
from minimax_tools.model.inputs import pad_rows
from minimax_tools.model.spec import ModelSpec
from minimax_tools.provenance import Provenance
from minimax_tools.results.prompt_results import Followed, PromptRanking, PromptResult, rank_prompts
from minimax_tools.results.results import Verdict
from minimax_tools.text.answered_prompts import AnsweredPrompt
from minimax_tools.text.prompts import pad_token_id
from neuron.model_runs.model_executor import ModelExecutor, PassRequest
from neuron.model_runs.passes import Pass, next_pass
from neuron.runs.device_request import refuse_other_model

_GOLDEN_PACKAGES = ("transformers", "accelerate")
_ROWS_FILE, _REPORT_FILE = "rows.json", "report.json"
# Characters at the end of a failed command's output that an error quotes.
_MOST_ERRORS = 600


def plan_prompt_passes(
    prompts: Sequence[AnsweredPrompt],
    *,
    padding_side: str,
    buckets: tuple[int, ...] = (),
    pad_token_id: int,
    last_position: int,
) -> list[Pass]:
    """Plan the passes; the prefill is padded to the longest prompt, or to the smallest of `buckets` that holds it.

    The `columns` of a pass are the indices of its tokens in each prompt's row, -1 for others.
    """
    prefill = _plan_prefill(prompts, padding_side=padding_side, buckets=buckets, pad_token_id=pad_token_id)
    passes = [prefill]
    lengths = torch.tensor([len(prompt.prompt_ids) for prompt in prompts])
    for number in range(1, max(len(prompt.answer_ids) for prompt in prompts) + 1):
        fed = [prompt.row[min(len(prompt.prompt_ids) + number, len(prompt.row)) - 1] for prompt in prompts]
        has_ended = torch.tensor([number > len(prompt.answer_ids) for prompt in prompts])
        columns = torch.where(has_ended, -1, lengths + number - 1)[:, None]
        step = next_pass(passes[-1], torch.tensor(fed)[:, None], last_position=last_position)
        passes.append(replace(step, columns=columns))
    return passes


def _plan_prefill(
    prompts: Sequence[AnsweredPrompt], *, padding_side: str, buckets: tuple[int, ...], pad_token_id: int
) -> Pass:
    inputs = pad_rows(
        [list(prompt.prompt_ids) for prompt in prompts],
        padding_side=padding_side,
        buckets=buckets,
        pad_token_id=pad_token_id,
        source="prompts",
    )
    is_real = inputs.attention_mask.bool()
    return Pass(
        number=0,
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        position_ids=inputs.position_ids,
        columns=torch.where(is_real, inputs.position_ids, -1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PortRecord:
    """The batches of one list that a port has run."""

    directory: Path
    run_digest: str  # sha256 of all that decides the port's numbers

    @classmethod
    def open(cls, directory: Path, provenance: Provenance) -> PortRecord:
        """Open the record of a run; `provenance` names port, model, device, libraries and options."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CaptureError(
                f"{directory} cannot be made", found=str(error), next_step="Choose another --output-dir."
            ) from error
        text = json.dumps(encode(provenance), sort_keys=True)
        return cls(directory=directory, run_digest=hashlib.sha256(text.encode()).hexdigest())

    def read(self, batch: list[AnsweredPrompt]) -> list[PortLogits] | None:
        """Read the logits of a batch that ran before; None if it did not."""
        try:
            with safetensors.safe_open(self._path(batch), framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return [
                PortLogits(
                    tokens=tensors[f"{place}.tokens"],
                    logits=TokenLogits(**{name: tensors[f"{place}.{name}"] for name in LOGITS_FIELDS}),
                )
                for place in range(len(batch))
            ]
        except (OSError, KeyError, safetensors.SafetensorError):
            # Not there, or not whole: the batch runs again.
            return None

    def write(self, batch: list[AnsweredPrompt], logits: list[PortLogits]) -> None:
        """Keep the logits of a batch."""
        tensors: dict[str, torch.Tensor] = {}
        for place, port in enumerate(logits):
            tensors[f"{place}.tokens"] = port.tokens.contiguous()
            for name in LOGITS_FIELDS:
                tensors[f"{place}.{name}"] = getattr(port.logits, name).contiguous()
        with whole_capture_file(self._path(batch)) as path:
            save_file(tensors, path)

    def _path(self, batch: list[AnsweredPrompt]) -> Path:
        rows: Any = [[prompt.prompt_ids, prompt.answer_ids] for prompt in batch]
        digest = hashlib.sha256(f"{self.run_digest} {json.dumps(rows)}".encode()).hexdigest()
        return self.directory / f"batch_{digest[:32]}.safetensors"


@dataclass(frozen=True, kw_only=True)
class PromptRun:
    """A list of prompts, and their golden logits."""

    prompts: tuple[AnsweredPrompt, ...]
    spec: ModelSpec
    goldens: GoldenRows
    padding_side: str
    buckets: tuple[int, ...]  # lengths that prompts are padded to; empty: to the longest of a batch
    batch_size: int

    def batches(self) -> list[list[int]]:
        """Divide the prompts into batches, by their numbers: those with answers of similar length together."""
        order = sorted(
            range(len(self.prompts)),
            key=lambda number: (len(self.prompts[number].answer_ids), len(self.prompts[number].prompt_ids)),
        )
        return [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]

    def batch_of(self, number: int) -> list[int]:
        """Return the batch of a prompt."""
        return next(batch for batch in self.batches() if number in batch)

    def is_missing(self, record: PortRecord) -> bool:
        """Decide whether a batch is not on record."""
        return any(
            record.read([self.prompts[number] for number in batch]) is None for batch in self.batches()
        )

    def run(self, executor: ModelExecutor, record: PortRecord, progress: Progress) -> None:
        """Run the port on all batches that are not on record, and put them there."""
        for index, numbers in enumerate(self.batches()):
            batch = [self.prompts[number] for number in numbers]
            if record.read(batch) is not None:
                progress.skip(index)
                continue
            record.write(batch, self.run_batch(executor, batch))
            progress.advance(index, num_bytes=0)

    def run_batch(self, executor: ModelExecutor, batch: Sequence[AnsweredPrompt]) -> list[PortLogits]:
        """Run the port on one batch: prefill, and the answers token by token."""
        passes = plan_prompt_passes(
            batch,
            padding_side=self.padding_side,
            buckets=self.buckets,
            pad_token_id=pad_token_id(self.spec),
            last_position=self.spec.max_position_embeddings - 1,
        )
        goldens = [self.goldens.read(prompt.row) for prompt in batch]
        pieces: list[list[PortLogits]] = [[] for _ in batch]
        for model_pass in passes:
            request = PassRequest(model_pass=model_pass, is_first=model_pass.number == 0, records=False)
            logits = self._vocabulary(executor.run(request).logits)
            for row, golden in enumerate(goldens):
                piece = _measure(model_pass, logits[row], row, golden)
                if piece is not None:
                    pieces[row].append(piece)
        return [
            PortLogits(
                tokens=torch.cat([piece.tokens for piece in row_pieces]),
                logits=join_tokens([piece.logits for piece in row_pieces]),
            )
            for row_pieces in pieces
        ]

    def rank(self, record: PortRecord, *, num_known: int) -> PromptRanking:
        """Judge all prompts from the record, and rank them."""
        ports: dict[int, PortLogits] = {}
        for numbers in self.batches():
            logits = record.read([self.prompts[number] for number in numbers])
            assert logits is not None, "all batches have run"
            ports |= zip(numbers, logits, strict=True)
        return self.judge(ports, num_known=num_known)

    def judge(self, ports: Mapping[int, PortLogits], *, num_known: int) -> PromptRanking:
        """Judge all prompts by a port's logits of each, and rank them."""
        in_order = [ports[number] for number in range(len(self.prompts))]
        results = self._judge.judge_all(self.prompts, in_order, self.goldens)
        return rank_prompts(
            results,
            num_known=num_known,
            golden_logits=str(self.goldens.store.directory),
            shares=self._judge.judge_together(results),
        )

    def judge_alone(self, number: int, executor: ModelExecutor) -> PromptResult:
        """Run one prompt in a batch of its own, and judge it."""
        prompts = [self.prompts[number]]
        (result,) = self._judge.judge_all(prompts, self.run_batch(executor, prompts), self.goldens)
        return result

    def _vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.shape[-1] < self.spec.vocab_size:
            raise TargetError(
                "the port's logits do not cover the vocabulary",
                expected=f"{self.spec.vocab_size} columns or more",
                found=str(logits.shape[-1]),
                next_step="Return the logits of all shards of the vocabulary, joined.",
            )
        return logits[..., : self.spec.vocab_size]

    @functools.cached_property
    def _judge(self) -> PromptJudge:
        rows = dict.fromkeys(prompt.row for prompt in self.prompts)
        return PromptJudge(level=NoiseLevel.of(self.goldens.read(row) for row in rows))


def trust_golden(golden: Capture, run: PromptRun, *, model: str) -> PromptRun:
    """Return a run that holds the golden's own logits to be right, of prompts where they agree with mm2's reference.

    A certified golden has right layers: few of its tokens may differ, as where noise sends them to other experts.
    Any other golden that differs is refused. `model` is the checkpoint as the user named it.

    Raises:
        IncomparableError: The golden must not be used with these golden logits.
    """
    refuse_other_model(golden, run.goldens.store.model)
    differing = [result for result in _judge_golden(run) if result.is_beyond]
    is_certified = golden.certificate is not None and golden.certificate.has_passed
    are_few = all(result.may_be_flips for result in differing)
    if not differing or (is_certified and are_few):
        wrong = {run.prompts[result.number].row for result in differing}
        captured = {row: logits for row, logits in run.goldens.captured.items() if row not in wrong}
        return replace(run, goldens=replace(run.goldens, captured=captured))
    command = ["mm2-gpu", "extract-all", "--model", model]
    cause = "Its head or experts are of other weights: capture another, and give it to --golden"
    if are_few:
        command = ["mm2-gpu", "certify", "--model", model, "--golden", str(golden.directory)]
        cause = "Few tokens differ: certify it, and give this command again"
    raise IncomparableError(
        f"the logits of the golden {golden.directory} are not those of mm2's reference",
        expected="a difference within noise",
        found=f"more in {', '.join(result.name for result in differing)}",
        next_step=f"{cause}: {shlex.join(command)}",
    )


def _judge_golden(run: PromptRun) -> list[PromptResult]:
    """Judge a golden's own logits of the prompts as those of a port; it holds all of them, or none."""
    captured, alone = run.goldens.captured, replace(run.goldens, captured={})
    ports = []
    for prompt in run.prompts if captured else ():
        tokens = torch.arange(len(prompt.row))
        logits = alone.read(prompt.row).measure(captured[prompt.row], tokens)
        ports.append(PortLogits(tokens=tokens, logits=logits))
    return replace(run, goldens=alone)._judge.judge_all(run.prompts, ports, alone) if ports else []


def _measure(model_pass: Pass, logits: torch.Tensor, row: int, golden: GoldenLogits) -> PortLogits | None:
    """Take the logits [s,V] of a row's real tokens, or [1,V] of its last one; None if the row has ended."""
    columns = model_pass.columns[row]
    places = (columns >= 0).nonzero().flatten()
    if not len(places):
        return None
    tokens = columns[places]
    if len(logits) == len(columns):
        values = logits[places]
    else:
        tokens, values = tokens[-1:], logits
    return PortLogits(tokens=tokens, logits=golden.measure(values, tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """The commands that lead from prompts to the layer; `directory` gets the golden and the port's capture."""

    directory: Path
    model: str
    port_options: tuple[str, ...]  # options of `mm2-test model` that name the port and its device
    padding_side: str
    buckets: tuple[int, ...] = ()  # lengths that rows are padded to
    golden: Path | None = None  # a golden that was given; None to make one of the prompts

    def follow(self, prompts: Sequence[AnsweredPrompt]) -> Followed:
        """Make the golden of some prompts, the first of which differs, and judge the port with it."""
        commands = []
        if self.golden is None:
            commands.append(self._golden_command(prompts))
        num_decoded = min(len(prompts[0].answer_ids), *(len(prompt.row) - 1 for prompt in prompts))
        commands.append(self._model_command(num_decoded))
        lines = tuple(map(shlex.join, commands))
        if self.golden is None and not all(map(importlib.util.find_spec, _GOLDEN_PACKAGES)):
            return Followed(commands=lines, exit_code=None)
        for command, line in zip(commands[:-1], lines, strict=False):
            completed = run_child((*command, "--quiet"))
            if completed.returncode != 0:
                raise CannotRunError(
                    "the golden of the worst prompt could not be made",
                    found=(completed.stderr or completed.stdout).strip()[-_MOST_ERRORS:],
                    next_step=f"Run it by hand: {line}",
                )
        completed = run_child((*commands[-1], "--json", "--quiet"))
        self._write(_REPORT_FILE, completed.stdout)
        could_judge = completed.returncode in (Verdict.PASS.exit_code, Verdict.FAIL.exit_code)
        return Followed(
            commands=lines,
            exit_code=completed.returncode,
            record=_read_record(completed.stdout),
            report_file=str(self.directory / _REPORT_FILE),
            errors="" if could_judge else completed.stderr.strip()[-_MOST_ERRORS:],
        )

    def _golden_command(self, prompts: Sequence[AnsweredPrompt]) -> tuple[str, ...]:
        rows = self._write(_ROWS_FILE, json.dumps([list(prompt.row) for prompt in prompts]))
        words = ["mm2-gpu", "full", "--model", self.model, "--input-ids", str(rows), "--max-new-tokens", "1"]
        words += ["--padding-side", self.padding_side, "--output-dir", str(self.directory / "golden")]
        longest = max(len(prompt.row) for prompt in prompts)
        fitting = [bucket for bucket in self.buckets if bucket >= longest]
        if fitting:
            words += ["--pad-to", str(min(fitting))]
        return tuple(words)

    def _model_command(self, num_decoded: int) -> tuple[str, ...]:
        golden = self.golden or self.directory / "golden"
        words = ["mm2-test", "model", "--model", self.model, "--golden", str(golden), *self.port_options]
        words += ["--decode", str(num_decoded), "--output-dir", str(self.directory / "port")]
        return tuple(words)

    def _write(self, name: str, text: str) -> Path:
        path = self.directory / name
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as file:
                file.write(text)
        except OSError as error:
            raise CaptureError(
                f"{path} cannot be written", found=str(error), next_step="Choose another --output-dir."
            ) from error
        return path


def _read_record(text: str) -> dict[str, Any] | None:
    try:
        record = parse_json(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
