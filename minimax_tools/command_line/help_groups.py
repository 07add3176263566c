"""The groups in which every command's help shows its options: one table of names for all commands.

A command's help begins with the options that matter first: those that it requires, then those that stand first in
the table, five at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

_NUM_FIRST = 5
_FIRST_TITLE = "Options that matter first"
# Names of options; the options that matter most stand best first.
_TABLE = {
    _FIRST_TITLE: """
        --golden --run --model --target --layer --layers --component --plan --preset --nodes-file --planner --node
        --output --backend --tp-degree --max-memory --stream --seq-len --prompt --prove --report-path
        --num-hidden-layers --output-dir --json
    """,
    "What to run": """
        --golden --run --model --target --layer --layers --start-layer --end-layer --layer-pattern --all-layers
        --component --sites --also --decode --chunks --max-new-tokens --plan --do-sample --temperature --top-k --top-p
        --slices --node --all-nodes --nodes-file --planner --context-length --module --float32-golden
        --all --exhaustive --chain-length --whole --full-size --load --follow --anew --skip-compile --undo
        --mistake --prove --list --captures --to --plan-of-names --keep --clear
    """,
    "Sizes of the model to make": """
        --preset --num-hidden-layers --hidden-size --num-attention-heads --num-key-value-heads --head-dim --rotary-dim
        --num-local-experts --num-experts-per-tok --intermediate-size --vocab-size --shard-size
    """,
    "Inputs": """
        --prompt --prompts-file --chat --input-ids --seq-len --quick --batch-size --last-tokens --padding-side --pad-to
        --max-length --start-positions --random-input --seed --continuation --samples --wrong --limit
        --prompts-at-once --golden-logits --bucket --format --map --golden-format --golden-map --run-format --run-map
        --records
    """,
    "Device": """
        --backend --compile --tp-degree --ep-degree --reduce-dtype --dtype --device-map --max-memory --offload-folder
        --stream --prefetch --packed-experts --memory-budget --attn-implementation --experts-implementation
        --layer-timeout --gpus --memory --disk-speed
    """,
    "Judging": """
        --criteria --metrics --noise-floor --floor-variants --certify --allow-uncertified --check-capture --digests
        --max-abs-diff --mean-abs-diff --similarity-percentage --cosine-similarity --pearson-correlation --rtol --atol
        --criteria-template
    """,
    "Output": """
        --output --output-dir --overwrite --replace --no-save --report-path --profile --profile-of --map-template
        --verbose --json --quiet --debug --version --help
    """,
}
_FIRST = _TABLE[_FIRST_TITLE].split()
# An option that the table lacks is in the first of these groups.
_GROUPS = {title: names.split() for title, names in _TABLE.items() if title != _FIRST_TITLE}
_LONGEST_NAME = 30


def write_options(command: click.Command, context: click.Context, formatter: click.HelpFormatter) -> None:
    """Write a command's options in groups, those that matter first at the top."""
    options = [param for param in command.get_params(context) if isinstance(param, click.Option)]
    records = {option: record for option in options if (record := option.get_help_record(context))}
    width = min(_LONGEST_NAME, max((len(name) for name, _ in records.values()), default=0))
    for title, members in _group(tuple(records)):
        with formatter.section(title):
            # Padded, so that all groups have their texts in one column.
            formatter.write_dl([(records[option][0].ljust(width), records[option][1]) for option in members])


def _group(options: Sequence[click.Option]) -> Iterator[tuple[str, list[click.Option]]]:
    telling = [option for option in options if option.required or _place(option, _FIRST) < len(_FIRST)]
    first = sorted(telling, key=lambda option: (not option.required, _place(option, _FIRST)))[:_NUM_FIRST]
    if first:
        yield _FIRST_TITLE, first
    rest = [option for option in options if option not in first]
    for title, names in _GROUPS.items():
        members = [option for option in rest if _title(option) == title]
        if members:
            yield title, sorted(members, key=lambda option: _place(option, names))


def _title(option: click.Option) -> str:
    titles = (title for title, names in _GROUPS.items() if set(option.opts) & set(names))
    return next(titles, next(iter(_GROUPS)))


def _place(option: click.Option, names: Sequence[str]) -> int:
    """Return the place of an option in a list of names; behind all if it is not there."""
    return min((names.index(name) for name in option.opts if name in names), default=len(names))
