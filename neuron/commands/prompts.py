"""The command `mm2-test prompts`: finds the prompts that a whole port answers otherwise, and goes on to the layer."""

from __future__ import annotations

from pathlib import Path

import click

from minimax_tools.command_line.console import Mm2Command, loading
from minimax_tools.command_line.options import (
    dtype_option,
    grouped_as,
    max_length_option,
    memory_budget_option,
    model_option,
    output_options,
    padding_options,
    search_store_options,
    stack_options,
    text_options,
)
from neuron.options import PromptOptions, backend_option, golden_option, rank_options


@click.command(
    "prompts",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\nExample: mm2-test prompts --model DIR --target port.py:Model --samples samples_gsm8k.jsonl --wrong",
)
@stack_options(
    model_option,
    click.option(
        "--target",
        metavar="PATH.py:NAME|package.module:NAME",
        help="Whole port to run: NAME(config) returns its module. Its code is executed. Default: none; the golden "
        "logits are made and kept for later runs.",
    ),
    text_options,
    click.option(
        "--continuation",
        "continuations",
        multiple=True,
        help="Answer to a prompt, fed token by token. One for each --prompt. Default: a prompt's own last tokens.",
    ),
    click.option(
        "--samples",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="File samples_*.jsonl of lm_eval --log_samples: prompts, and the answers on record.",
    ),
    click.option("--wrong", "only_wrong", is_flag=True, help="Take only samples that were answered wrongly."),
    golden_option(
        "Golden capture of the whole model, whose rows are the prompts. The worst is followed with it."
    ),
    click.option("--limit", type=click.IntRange(min=1), help="Take only the first N prompts. Default: all."),
    click.option(
        "--decode",
        "num_decoded",
        type=click.IntRange(min=0),
        metavar="N",
        help="Decode at most N tokens of an answer. Default: 32; without answers the last 4 tokens of each prompt.",
    ),
    max_length_option,
    click.option(
        "--prompts-at-once",
        type=click.IntRange(min=1),
        default=4,
        show_default=True,
        help="Prompts per batch.",
    ),
    padding_options,
    click.option(
        "--golden-logits",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder that keeps golden logits from run to run. Default: golden_logits under --captures.",
    ),
    click.option(
        "--follow/--no-follow",
        "follows",
        default=True,
        help="Make the golden of the worst prompt, and go on to the pass and the layer. Default: on.",
    ),
    backend_option,
    rank_options,
    memory_budget_option,
    dtype_option,
    search_store_options,
    output_options,
    grouped_as("options", PromptOptions),
)
def prompts_command(options: PromptOptions) -> None:
    """Find the prompts whose next tokens a port predicts otherwise, rank them, and follow the worst to its layer.

    Each prompt is prefilled, and its answer decoded token by token, whatever the port would choose itself. mm2's
    reference computes the same tokens exactly, and as right ports round: that is the noise of each token.
    """
    with loading():
        from neuron.commands.prompts_run import run_prompts

    run_prompts(options)
