"""`mm2-gpu export` at work: two goldens written in another tool's files."""

from __future__ import annotations

from pathlib import Path

from gpu_reference.export.vllm_neuron import ReferenceExport, SiteModules, export_reference, open_golden_pair
from minimax_tools.command_line.console import print_json, say


def export_goldens(
    format_name: str,
    golden: Path,
    float32_golden: Path,
    output_dir: Path,
    num_decoded: int,
    modules: tuple[str, ...],
    allow_uncertified: bool,
    as_json: bool,
) -> None:
    """Write two goldens in another tool's files, and print what was written."""
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
