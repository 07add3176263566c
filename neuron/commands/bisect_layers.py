"""`mm2-test bisect`: the wrong layers of a port, found by running parts of a range."""

from __future__ import annotations

import click

from compare.chains.largest_errors import LONGEST_CHAIN
from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import (
    dtype_option,
    memory_budget_option,
    model_option,
    output_options,
    search_store_options,
    span_options,
)
from minimax_tools.command_line.work import done_by
from neuron.options import (
    backend_option,
    compile_option,
    golden_option,
    prefetch_option,
    rank_options,
    target_option,
)
from neuron.runs.extent import Extent


@click.command(
    "bisect",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\nExample: mm2-test bisect --model DIR --golden GOLDEN --target port.py:DecoderLayer",
)
@model_option
@golden_option("Golden capture: gives the chains their inputs, and judges their outputs.", required=True)
@target_option
@backend_option
@compile_option
@rank_options
@span_options
@click.option(
    "--all",
    "extent",
    flag_value=Extent.ALL,
    type=Extent,
    help="Continue after each finding, to the last layer. Default: stop at the first that proves a layer wrong.",
)
@click.option(
    "--exhaustive",
    "extent",
    flag_value=Extent.EXHAUSTIVE,
    type=Extent,
    help="Run every layer alone instead of halves of the range; --chain-length then changes no result. With --whole: "
    "replace the stream at every layer, from the last on.",
)
@click.option(
    "--chain-length",
    type=click.IntRange(1, LONGEST_CHAIN),
    help="Layers per chain, run one after the other before they are judged. Longer chains hide small errors. "
    "Default: 2; 8 in float32.",
)
@click.option(
    "--whole",
    "is_whole",
    is_flag=True,
    help="The port is a whole port, as of mm2-test model, of which no layer can run alone: replace its stream by the "
    "golden's at one layer in each run, and judge its logits.",
)
@click.option(
    "--decode",
    "num_decoded",
    type=click.IntRange(min=0),
    metavar="N",
    help="With --whole: decode the last N tokens of each prompt one at a time. More of them "
    "show smaller mistakes. Default: 32, or half of the shortest prompt.",
)
@click.option("--anew", "is_anew", is_flag=True, help="Ignore the probes of earlier runs.")
@prefetch_option
@memory_budget_option
@dtype_option
@search_store_options
@output_options
@done_by("neuron.commands.work.bisect_layers", "bisect_port")
def bisect_command() -> None:
    """Find the first wrong layer by running halves of a range.

    If no chain drifts, 62 layers take seven runs at most: log2 of their number, rounded up, plus one. Each run goes
    through its layers in short chains, up to the first wrong one. A chain starts from the golden's input and only its
    last output is judged, so a port needs to show nothing but its output. Finished runs are stored: with the same port,
    golden, dtype and chain length, an interrupted bisection continues where it stopped.

    Exits with 1 if a layer is wrong, or a chain is far beyond its limit. Exits with 0 if no error was large enough to
    be seen; the output says how large that is. A chain a little beyond its limit drifts: that is a warning, which exits
    with 0 too, and the search goes on behind it, with more runs.

    With --whole, the last wrong layer is found: the one behind which the golden's stream makes the logits right, and
    before which it does not.
    """
