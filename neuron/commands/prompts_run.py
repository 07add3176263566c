"""A run of prompts as `mm2-test prompts` carries it out: run and ranked, and the worst followed to its layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compare.untested import untested_by_prompts
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.console import end_command, print_json, print_text, say
from minimax_tools.errors import UsageError, format_count
from minimax_tools.golden_logits.golden_rows import GoldenRows
from minimax_tools.golden_logits.logits_store import LOGITS_FOLDER, LogitsStore
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.machine.native_output import output_set_aside
from minimax_tools.machine.progress import LayerProgress
from minimax_tools.machine.stops import same_command
from minimax_tools.machine.streams import write
from minimax_tools.model.spec import ModelSpec
from minimax_tools.provenance import Provenance
from minimax_tools.results.prompt_results import Followed, PromptRanking
from minimax_tools.results.results import Verdict
from minimax_tools.text.answered_prompts import (
    AnsweredPrompt,
    cut_prompt,
    encode_prompts,
    encode_samples,
    token_rows,
)
from minimax_tools.text.lm_eval_samples import read_lm_eval_samples
from minimax_tools.text.prompts import read_prompts, refuse_unknown_ids
from minimax_tools.text.tokenizer import decode_rows, has_tokenizer
from neuron.devices.runtime import Runtime, open_runtime
from neuron.model_runs.model_executor import ModelExecutor
from neuron.options import PromptOptions, name_port
from neuron.ports.targets import find_model_target
from neuron.prompt_runs.prompt_run import Follower, PortRecord, PromptRun, trust_golden
from neuron.runs.port_setup import ModelSetup
from reports.prompts import prompts_record, render_followed, render_prompts

# Tokens of an answer that are decoded, and of a golden's rows, if --decode does not say.
_MOST_DECODED = 32
_GOLDEN_DECODED = 4


def run_prompts(options: PromptOptions) -> None:
    """Run the prompts, rank them, follow the worst, and end with the verdict's exit code."""
    spec = ModelSpec.from_folder(resolve_config(options.model))
    folder = resolve_model(options.model)
    _refuse_contradictions(options)
    golden = None if options.golden is None else Capture.open(options.golden).of_whole_ports()
    prompts = _read_prompts(options, golden, folder, spec)
    directory = options.store.directory(DEVICE_SIDE, "prompts")
    with output_set_aside(), CheckpointReader(folder) as reader:
        folder_of_logits = options.golden_logits or options.store.captures / LOGITS_FOLDER
        goldens = GoldenRows.open(folder_of_logits, reader=reader, spec=spec, golden=golden)
        run = PromptRun(
            prompts=tuple(prompts),
            spec=spec,
            goldens=goldens,
            padding_side=options.padding_side or "right",
            buckets=options.pad_to,
            batch_size=options.prompts_at_once,
        )
        if options.target is None:
            num_known = goldens.make([prompt.row for prompt in prompts])
            ranking = None
        else:
            with open_runtime(options.backend, ranks=options.ranks) as runtime:
                num_known = goldens.make([prompt.row for prompt in prompts])
                if golden is not None:
                    run = trust_golden(golden, run, model=options.model)
                ranking = _run_port(options, run, folder, directory, runtime, reader, num_known=num_known)
    if ranking is None:
        _print_golden(options, goldens.store, len(prompts), num_known)
        end_command(0)
    notes = () if golden is None else golden.row_notes
    untested = untested_by_prompts(
        longest=max(len(prompt.row) for prompt in prompts),
        num_decoded=sum(result.decode is not None for result in ranking.results),
        num_ranks=options.ranks.degree,
    )
    ranking = replace(ranking, words=_words(folder, ranking), notes=notes, untested=untested)
    _print_and_follow(options, run, ranking, directory)
    end_command(ranking.verdict.exit_code)


def _run_port(
    options: PromptOptions,
    run: PromptRun,
    folder: Path,
    directory: Path,
    runtime: Runtime,
    reader: CheckpointReader,
    *,
    num_known: int,
) -> PromptRanking:
    """Run the port on the prompts that are not on record, rank all, and run the worst alone."""
    assert options.target is not None, "a run has a port"
    target = find_model_target(options.target)
    setup = ModelSetup(
        target=target,
        spec=run.spec,
        model_source=options.model,
        folder=folder,
        dtype=options.dtype,
        sites=(),
        budget=MemoryBudget(options.memory_budget),
    )
    record = PortRecord.open(
        directory / "logits",
        Provenance(
            model=run.goldens.store.model,
            model_source=str(run.goldens.store.directory),
            backend=str(runtime.backend),
            device=runtime.backend.description,
            dtypes={"weights": str(options.dtype)},
            target=target.name,
            target_digest=target.source_digest,
            options={
                "padding_side": run.padding_side,
                "pad_to": list(options.pad_to),
                **target.sharing(runtime),
            },
        ),
    )
    batches = run.batches()
    ranking: PromptRanking | None = None
    if not run.is_missing(record):
        ranking = run.rank(record, num_known=num_known)
        if ranking.verdict is Verdict.PASS:
            return ranking
    with (
        LayerProgress(len(batches), label="Batches", unit="batch") as progress,
        ModelExecutor(setup, runtime=runtime, reader=reader) as executor,
    ):
        run.run(executor, record, progress)
        ranking = ranking or run.rank(record, num_known=num_known)
        if ranking.differing and len(run.batch_of(ranking.results[0].number)) > 1:
            return replace(ranking, alone=run.judge_alone(ranking.results[0].number, executor))
    return ranking


def _refuse_contradictions(options: PromptOptions) -> None:
    """Raise UsageError if the options name no source of prompts, several, or what belongs to another one."""
    has_text = bool(options.prompts) or options.prompts_file is not None
    if sum((has_text, options.samples is not None, options.golden is not None)) != 1:
        raise UsageError(
            "the prompts come from none or several sources",
            expected="one of --prompt/--prompts-file, --samples, --golden",
        )
    if options.only_wrong and options.samples is None:
        raise UsageError("--wrong has no samples to choose from", next_step="Give --samples.")
    if options.continuations and options.prompts_file is not None:
        raise UsageError(
            "--continuation belongs to --prompt",
            next_step="Give a samples file for many prompts with answers.",
        )


def _read_prompts(
    options: PromptOptions, golden: Capture | None, folder: Path, spec: ModelSpec
) -> list[AnsweredPrompt]:
    if golden is not None:
        inputs = golden.read_inputs()
        num_decoded = min(_GOLDEN_DECODED, *(length - 1 for length in inputs.lengths))
        if options.num_decoded is not None:
            num_decoded = options.num_decoded
        return token_rows(folder, inputs, num_decoded=num_decoded)[: options.limit]
    prompts = _read_samples(options, folder) if options.samples is not None else _read_texts(options, folder)
    for prompt in prompts:
        step = "Is the tokenizer that of the checkpoint?"
        refuse_unknown_ids(prompt.row, name=prompt.name, spec=spec, next_step=step)
    num_decoded = _MOST_DECODED if options.num_decoded is None else options.num_decoded
    max_length = min(options.max_length or spec.max_position_embeddings, spec.max_position_embeddings)
    return [
        cut_prompt(prompt, num_decoded=num_decoded, max_length=max_length)
        for prompt in prompts[: options.limit]
    ]


def _read_texts(options: PromptOptions, folder: Path) -> list[AnsweredPrompt]:
    texts = [*options.prompts, *read_prompts(options.prompts_file)]
    return encode_prompts(folder, texts, options.continuations, chat=options.chat)


def _read_samples(options: PromptOptions, folder: Path) -> list[AnsweredPrompt]:
    assert options.samples is not None, "the caller has checked it"
    samples = read_lm_eval_samples(options.samples)
    if options.only_wrong:
        if all(sample.is_right is None for sample in samples):
            raise UsageError(
                f"{options.samples} does not say which answers are wrong",
                expected="metrics of each sample",
                next_step="Leave out --wrong.",
            )
        samples = [sample for sample in samples if sample.is_right is False]
        if not samples:
            raise UsageError(f"{options.samples} holds no wrong answer", next_step="Leave out --wrong.")
    return encode_samples(folder, samples)


def _words(folder: Path, ranking: PromptRanking) -> dict[int, str]:
    if not has_tokenizer(folder):
        return {}
    choices = [phase.first_choice for result in ranking.results for phase in result.phases]
    tokens = sorted(
        {token for one in choices if one is not None for token in (one.golden, one.port) if token >= 0}
    )
    return dict(zip(tokens, decode_rows(folder, [[token] for token in tokens]), strict=True))


def _print_golden(options: PromptOptions, store: LogitsStore, num_prompts: int, num_known: int) -> None:
    if options.as_json:
        record = {"golden_logits": str(store.directory), "num_prompts": num_prompts, "num_known": num_known}
        print_json(record, next_commands=())
        return
    say(
        f"Golden logits of {format_count(num_prompts, 'prompt')} in {store.directory}, "
        f"{num_known} of them kept from earlier runs"
    )


def _print_and_follow(
    options: PromptOptions, run: PromptRun, ranking: PromptRanking, directory: Path
) -> None:
    assert options.target is not None, "there is a ranking of a port"
    if not options.as_json:
        write(render_prompts(ranking, target=options.target))
    followed = None
    if options.follows and ranking.verdict is Verdict.FAIL:
        worst = ranking.results[0].number
        batch = run.batch_of(worst) if ranking.is_of_batch else [worst]
        numbers = [worst, *(number for number in batch if number != worst)]
        follower = Follower(
            directory=directory / run.prompts[worst].name.replace(" ", "_").replace(",", ""),
            model=options.model,
            port_options=name_port(
                target=options.target,
                backend=options.backend,
                dtype=options.dtype,
                ranks=options.ranks,
            ),
            padding_side=run.padding_side,
            buckets=options.pad_to,
            golden=options.golden,
        )
        followed = follower.follow([run.prompts[number] for number in numbers])
    following = _after_ranking(ranking, followed)
    if options.as_json:
        record = prompts_record(ranking, target=options.target, followed=followed)
        print_json(record, next_commands=following)
    else:
        print_text("" if followed is None else render_followed(followed), next_commands=following)


def _after_ranking(ranking: PromptRanking, followed: Followed | None) -> tuple[str, ...]:
    """Return what comes next where prompts differ: from the worst to its layer, or what the layer's report says."""
    if ranking.verdict is Verdict.PASS:
        return ()
    if followed is None:
        return (same_command("mm2-test", without=["--no-follow"]),)
    if followed.record is None:
        return followed.commands
    return tuple(followed.record.get("next", ()))
