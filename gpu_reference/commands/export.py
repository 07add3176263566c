"""`mm2-gpu export`: goldens written as the reference captures of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from minimax_tools.capture.store import GOLDEN_SIDE
from minimax_tools.command_line.console import Mm2Command, loading, print_json, say
from minimax_tools.command_line.options import CapturePath, complete_captures, output_options
from minimax_tools.dumps.format_names import VLLM_NEURON

if TYPE_CHECKING:
    from gpu_reference.export.vllm_neuron import ReferenceExport


@click.command(
    "export",
    cls=Mm2Command,
    epilog="\b\nExample: mm2-gpu export --format vllm-neuron --golden GOLDEN --float32-golden GOLDEN32 "
    "--output-dir REPORT",
)
@click.option(
    "--format",
    "format_name",
    type=click.Choice([VLLM_NEURON]),
    required=True,
    help="Tool that reads the captures.",
)
@click.option(
    "--golden",
    type=CapturePath(),
    required=True,
    help="BF16 golden, certified.",
    shell_complete=complete_captures(GOLDEN_SIDE),
)
@click.option(
    "--float32-golden",
    type=CapturePath(),
    required=True,
    help="Golden of the same model and tokens, made with --dtype float32 and certified.",
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="New folder; the tool's own output_dir.",
)
@click.option(
    "--decode",
    "num_decoded",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="The last N tokens of each row were decoded: write a pass for each.",
)
@click.option(
    "--module",
    "modules",
    multiple=True,
    metavar="SITE=MODULE",
    help="The port's name of a site's module, such as moe_delta=model.layers.{layer}.block_sparse_moe. Repeatable. "
    "Default: transformers' names.",
)
@click.option(
    "--allow-uncertified", is_flag=True, help="Take goldens without a certificate, or a partial one."
)
@output_options
def export_command(
    format_name: str,
    golden: Path,
    float32_golden: Path,
    output_dir: Path,
    num_decoded: int,
    modules: tuple[str, ...],
    allow_uncertified: bool,
    as_json: bool,
) -> None:
    """Write two goldens, in BF16 and in float32, as the reference captures of another tool.

    vLLM Neuron's accuracy debugger compares a port with Hugging Face in float32 and in BF16. It loads the model whole
    for both, and rounds MiniMax-M2's router to BF16. The files written here replace those captures.
    """
    with loading():
        from gpu_reference.export.vllm_neuron import SiteModules, export_reference, open_golden_pair

    site_modules = SiteModules.parse(modules)
    pair = open_golden_pair(golden, float32_golden, allows_uncertified=allow_uncertified)
    export = export_reference(pair, output_dir, modules=site_modules, num_decoded=num_decoded)
    if as_json:
        print_json(_record(export, format_name), next_commands=())
    else:
        say(_render(export))


def _record(export: ReferenceExport, format_name: str) -> dict[str, object]:
    return {
        "directory": str(export.directory),
        "format": format_name,
        "prompts": [[str(pass_) for pass_ in passes] for passes in export.passes],
        "layers": list(export.layers),
        "modules": list(export.modules),
        "cached_layers": list(export.cached_layers),
    }


def _render(export: ReferenceExport) -> str:
    lines = [f"Wrote {export.directory}"]
    for prompt, passes in enumerate(export.passes):
        lines.append(f"  prompt {prompt}  {', '.join(str(pass_) for pass_ in passes)}")
    lines.append(f"  captures  hf_fp32 and hf_bf16 of {len(export.modules)} modules in each pass")
    if export.cached_layers:
        lines.append(f"  caches    fp32_kv.pt and hf_kv.pt of {len(export.cached_layers)} layers")
    else:
        lines.append("  caches    none: the goldens do not hold k_rope and v_proj (--sites all)")
    return "\n".join(lines)
