"""Options of the commands that run a port on a device, ranks among them; the port that they name, as words again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from compare.options import criteria_options, report_option
from minimax_tools.capture.store import GOLDEN_SIDE
from minimax_tools.command_line.console import LateValue, loading
from minimax_tools.command_line.options import (
    DEFAULT_DTYPE,
    DTYPE_NAMES,
    CapturePath,
    CaptureStore,
    complete_captures,
    grouped_as,
    input_options,
    judging_output_options,
    memory_budget_option,
    model_option,
    read_dtype,
    run_options,
    span_options,
    stack_options,
    store_options,
)
from minimax_tools.stored_dtype import dtype_name
from minimax_tools.text.input_request import InputRequest
from neuron.devices.backend import Backend
from neuron.devices.compiler import AUTO, OFF, Compiler
from neuron.process.record import LAYER_TIMEOUT_S
from neuron.process.status import limit_layers

if TYPE_CHECKING:
    import torch

    from compare.limits.criteria import Criteria
    from minimax_tools.capture.further import FurtherPlace
    from minimax_tools.model.run import Extent
    from minimax_tools.model.span import Span
    from neuron.devices.ranks import Ranks


Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = stack_options(
    click.option(
        "--tp-degree",
        type=click.IntRange(min=1),
        metavar="T",
        help="Number of ranks that share a layer. mm2-test starts them, or torchrun --nproc-per-node T -m neuron.  "
        "[default: the ranks that torchrun started, else 1]",
    ),
    click.option(
        "--ep-degree",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="D",
        help="Number of groups of ranks that the experts are divided among; must divide T.",
    ),
    click.option(
        "--reduce-dtype",
        type=click.Choice(DTYPE_NAMES),
        default="float32",
        show_default=True,
        callback=read_dtype,
        help="Dtype in which mm2's own layer adds up the partial sums of the ranks.",
    ),
)


def rank_options(command: Command) -> Command:
    """Add the options to a command, which then runs on rank 0 and takes `ranks` in their place."""

    @functools.wraps(command)
    def run(**options: Any) -> Any:
        with loading():
            from neuron.commands.launch import run_on_ranks

        return run_on_ranks(command, options)

    decorated: Command = _OPTIONS(run)  # type: ignore[assignment]  # functools.wraps keeps its signature
    return decorated


@dataclass(frozen=True, slots=True, kw_only=True)
class PortOptions:
    """The options of all runs of a port. Their help texts, here and in the options that are imported, explain them.

    None leaves a choice to the machine, or stands for an option that was not given.
    """

    model: str
    backend: str  # a `Backend` by name, or `auto`
    ranks: Ranks
    memory_budget: int | None  # in bytes
    dtype: torch.dtype
    store: CaptureStore


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions(PortOptions):
    """The options of a run of layers."""

    golden: Path | None
    target: str
    compile_with: str  # a `Compiler` by name, `auto` or `off`
    random_input: bool
    prefetch: bool | None
    num_decoded: int  # tokens at the end of each prompt that are computed one at a time
    check_capture: bool
    profile: bool
    skip_compile: bool
    criteria: Criteria
    shows_metrics: bool
    is_verbose: bool
    report_path: Path | None  # folder of a report; None for none
    inputs: InputRequest  # the prompts, as rows of token ids, that the options ask for
    sites_level: str  # a named choice of sites to record
    as_json: str | None  # the form of JSON; None for text
    further: tuple[FurtherPlace, ...] = ()  # further outputs of the port to store
    max_new_tokens: int = 0  # an option of `mm2-test full` only


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectOptions(PortOptions):
    """The options of `mm2-test bisect`."""

    golden: Path
    target: str
    compile_with: str  # a `Compiler` by name, `auto` or `off`
    span: Span | None
    extent: Extent | None
    chain_length: int | None
    is_whole: bool
    num_decoded: int | None
    is_anew: bool
    prefetch: bool | None
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(PortOptions):
    """The options of a whole port's run."""

    golden: Path
    target: str
    num_decoded: int | None  # None for the usual number
    max_new_tokens: int
    runs_chunks: bool  # whether to run passes of several tokens behind a cache too
    report_path: Path | None  # folder of a report; None for none
    as_json: str | None  # the form of JSON; None for text


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions(PortOptions):
    """The options of `mm2-test prompts`."""

    target: str | None
    prompts: tuple[str, ...]
    prompts_file: Path | None
    continuations: tuple[str, ...]
    samples: Path | None
    only_wrong: bool
    chat: bool
    golden: Path | None
    limit: int | None  # most prompts
    num_decoded: int | None
    max_length: int | None
    prompts_at_once: int  # prompts per batch
    padding_side: str | None  # None: right
    pad_to: tuple[int, ...]
    golden_logits: Path | None
    follows: bool
    as_json: bool


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

backend_option = click.option(
    "--backend",
    type=click.Choice(["auto", *(str(backend) for backend in Backend)]),
    default="auto",
    show_default=True,
    help="Backend that computes; auto takes the best one on this machine.",
)


def golden_option(help_text: str, *, required: bool = False) -> Decorator:
    """Return the option `--golden`; the help says what the golden is for."""
    return click.option(
        "--golden",
        type=CapturePath(),
        required=required,
        help=help_text,
        shell_complete=complete_captures(GOLDEN_SIDE),
    )


compile_option = click.option(
    "--compile",
    "compile_with",
    type=click.Choice([AUTO, OFF, *(str(compiler) for compiler in Compiler)]),
    default=AUTO,
    show_default=True,
    help="Backend of torch.compile that runs each layer, its sites as outputs of the graph; auto is neuron on "
    "--backend neuron, and off elsewhere.",
)
# A port may hang. The limit is no argument of a command: it is noted for the supervisor, which ends the process.
layer_timeout_option = click.option(
    "--layer-timeout",
    type=click.FloatRange(min=0),
    default=LAYER_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    expose_value=False,
    callback=lambda _, __, timeout_s: limit_layers(timeout_s),
    help="Longest time for one pass through a layer, or through a whole port, in seconds, compiling included; 0 for "
    "no limit.",
)
target_option = stack_options(
    click.option(
        "--target",
        default="builtin",
        show_default=True,
        metavar="builtin|reference|PATH.py:NAME|package.module:NAME|nxdi:…|traced:FILE",
        help="Implementation to run: mm2's own layer, a port's class, nxdi: and a class on "
        "neuronx-distributed-inference, or a file of mm2-test trace. Its code is executed.",
    ),
    layer_timeout_option,
)
prefetch_option = click.option(
    "--prefetch/--no-prefetch",
    default=None,
    help="Read the next layer from the disk while one runs. Default: on if memory holds both.",
)


def _read_further(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> LateValue:
    def find(_: click.Context) -> tuple[FurtherPlace, ...]:
        from minimax_tools.capture.further import parse_further

        return parse_further(texts)

    return LateValue(find)


def _device_options(*further: Decorator) -> Decorator:
    # Groups of options come after `rank_options`: only rank 0 builds them, so an error shows once.
    return stack_options(
        model_option,
        golden_option("Golden capture: gives the inputs, and judges the run. Default: none."),
        target_option,
        backend_option,
        compile_option,
        rank_options,
        *further,
        click.option("--random-input", is_flag=True, help="Feed the first layer random hidden states."),
        prefetch_option,
        memory_budget_option,
        click.option(
            "--decode",
            "num_decoded",
            type=click.IntRange(min=0),
            default=0,
            metavar="N",
            help="Compute the last N tokens of each prompt one at a time, from the cached keys and values. Default: 0.",
        ),
        click.option(
            "--also",
            "further",
            multiple=True,
            metavar="NAME=PLACE",
            callback=_read_further,
            help="Also store a tensor of the port that is no site; it is never judged. PLACE is a submodule's path, "
            "PATH:input[1] or, of the layer itself, :output[1]. Repeat for several.",
        ),
        click.option(
            "--check-capture",
            is_flag=True,
            help="Run every layer once more with nothing recorded, and report whether recording changes its output.",
        ),
        click.option(
            "--profile",
            is_flag=True,
            help="Report the time and memory of every layer, as a table and a trace file in the capture directory.",
        ),
        click.option(
            "--skip-compile", is_flag=True, help="Load the saved run instead of compiling and running."
        ),
        criteria_options,
        input_options,
        run_options,
        store_options,
        report_option,
        judging_output_options,
        grouped_as("options", DeviceOptions),
    )


device_options = _device_options()
span_device_options = _device_options(span_options)


def port_arguments(options: DeviceOptions) -> tuple[str, ...]:
    """Return the options that name a port, its device, dtype and ranks, as a command takes them."""
    return name_port(target=options.target, backend=options.backend, dtype=options.dtype, ranks=options.ranks)


def name_port(*, target: str, backend: str, dtype: torch.dtype, ranks: Ranks) -> tuple[str, ...]:
    """Return the options of any command that name a port, its device, dtype and ranks."""
    words = ["--target", target, "--backend", backend]
    words += [] if dtype_name(dtype) == DEFAULT_DTYPE else ["--dtype", dtype_name(dtype)]
    for name, value in ranks.as_json().items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return tuple(words)
