"""The command `mm2-test weights`: where every element of a layer lands in a port, and whether that is right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from minimax_tools.checkpoint.layer_faults import warn_of_rounded_router
from minimax_tools.command_line.console import (
    Mm2Command,
    end_command,
    leave_record,
    loading,
    print_json,
    print_text,
)
from minimax_tools.command_line.options import (
    dtype_option,
    memory_budget_option,
    model_option,
    output_options,
)
from minimax_tools.errors import UsageError
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.machine.native_output import output_set_aside
from minimax_tools.machine.stops import same_command
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import one_layer_of_each_kind
from neuron.devices.backend import Backend
from neuron.options import name_port, rank_options, target_option

if TYPE_CHECKING:
    import torch

    from minimax_tools.results.results import Verdict
    from neuron.devices.ranks import Ranks
    from neuron.weight_trace.inspection import WeightInspection


@click.command(
    "weights",
    cls=Mm2Command,
    epilog="\b\nExample: mm2-test weights --model DIR --target port.py:DecoderLayer",
)
@model_option
@target_option
@click.option(
    "--backend",
    type=click.Choice([str(Backend.CPU)]),
    default=str(Backend.CPU),
    show_default=True,
    help="Where the port runs: always the CPU, as conversions run on the host.",
)
@rank_options
@click.option(
    "--layer", type=click.IntRange(min=0), help="Layer number. Default: the first layer of each kind."
)
@click.option(
    "--all-layers",
    is_flag=True,
    help="Trace every layer of the model; layers with the same findings are told once.",
)
@click.option(
    "--full-size", is_flag=True, help="Trace a layer of the model's own size instead of a smaller one."
)
@click.option(
    "--load/--no-load",
    "loads",
    default=True,
    show_default=True,
    help="Also load the checkpoint's own layer and compare all values with the checkpoint.",
)
@memory_budget_option
@dtype_option
@output_options
def weights_command(
    *,
    model: str,
    target: str,
    backend: str,
    ranks: Ranks,
    layer: int | None,
    all_layers: bool,
    full_size: bool,
    loads: bool,
    memory_budget: int | None,
    dtype: torch.dtype,
    as_json: bool,
) -> None:
    """Trace where every element of a layer's weights lands in a port, and name what is wrong with it.

    The port's conversion and strict loading get generated tensors whose values encode their own position. They show
    each weight that is missing, duplicated, swapped, transposed, out of order, scaled, computed or rounded.

    Only the port's forward decides which layout is right. So the port is run once on generated weights, in float32 on
    the CPU, beside the reference layer. If the outputs differ, the repair that makes them agree names the mistake.

    Of a model with several kinds of layers, such as dense ones and mixtures of experts, one of each is traced.

    Large models are traced at a smaller size. With --full-size, as many experts are traced element by element as fit in
    --memory-budget (default: the machine's free memory), and the report names them. The values of all experts are
    compared once the checkpoint's layer is loaded.

    Exits with 1 if weights are wrong.
    """
    with loading():
        import torch

        from minimax_tools.checkpoint.filling import ReadingPool
        from minimax_tools.checkpoint.reader import CheckpointReader
        from minimax_tools.machine.memory import MemoryBudget
        from neuron.devices.runtime import open_runtime
        from neuron.ports.targets import find_target
        from neuron.ports.traced import PREFIX as COMPILED_PREFIX
        from neuron.weight_trace.inspection import TracedPort, group_inspections, inspect_weights
        from neuron.weight_trace.report import (
            inspection_record,
            inspections_record,
            render_inspections,
        )
        from neuron.weight_trace.trace_size import smaller_spec

    spec = ModelSpec.from_folder(resolve_config(model))
    if all_layers and layer is not None:
        raise UsageError("--layer and --all-layers were both given", next_step="Use one of them.")
    if layer is not None:
        Span.single(layer).within(spec.num_hidden_layers)
    chosen = range(spec.num_hidden_layers) if all_layers else one_layer_of_each_kind(spec)
    numbers = chosen if layer is None else (layer,)
    if target.startswith(COMPILED_PREFIX):
        # A port that `mm2-test trace` compiled into a file, whereas a `TracedPort` is one whose weights are traced.
        raise UsageError(
            f"--target {target} contains its weights: there is no conversion to trace",
            next_step="Name the port that it was compiled from.",
        )
    layers = range(numbers[0], numbers[-1] + 1)
    folder = resolve_model(model, layers=layers)
    with (
        output_set_aside(),
        open_runtime(backend, ranks=ranks) as runtime,
        CheckpointReader(folder, layers=layers) as reader,
        ReadingPool(torch.get_num_threads()) as pool,
    ):
        warn_of_rounded_router(reader.index.entries, spec.graph)
        found = find_target(target)

        def inspect_layers() -> Iterator[WeightInspection]:
            for number in numbers:
                port = TracedPort(
                    target=found,
                    spec=spec if full_size else smaller_spec(spec, number, num_ranks=ranks.degree),
                    layer=number,
                    dtype=dtype,
                    reader=reader,
                    runtime=runtime,
                    pool=pool,
                )
                # Only rank 0 comes here.
                with port.on_all_ranks():
                    inspection = inspect_weights(port, spec, loads=loads, budget=MemoryBudget(memory_budget))
                yield inspection

        groups = group_inspections(inspect_layers(), joins=all_layers)
    verdict = groups[0].first.verdict
    following = _after_inspection(verdict, model=model, target=target, ranks=ranks, dtype=dtype)
    is_one = len(numbers) == 1 and not all_layers
    record = inspection_record(groups[0].first) if is_one else inspections_record(groups)
    text = render_inspections(groups, is_brief=all_layers)
    leave_record(lambda: record, text, next_commands=following)
    if as_json:
        print_json(record, next_commands=following)
    else:
        print_text(text, next_commands=following)
    end_command(verdict.exit_code)


def _after_inspection(
    verdict: Verdict, *, model: str, target: str, ranks: Ranks, dtype: torch.dtype
) -> tuple[str, ...]:
    """Return what comes next: the trace again if weights are wrong, once they are mended; else the port's run."""
    from minimax_tools.capture.run_commands import judge_port_of
    from minimax_tools.results.results import Verdict

    if verdict is not Verdict.FAIL:
        return (judge_port_of(model, *name_port(target=target, backend="auto", dtype=dtype, ranks=ranks)),)
    return (same_command("mm2-test"),)
