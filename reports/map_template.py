"""The template of a map: what a dump's modules are called, and where mm2 found sites, for its user to fill in."""

from __future__ import annotations

from collections.abc import Iterator

from minimax_tools.capture.source import CaptureSource
from minimax_tools.dumps.capture import ForeignCapture
from minimax_tools.dumps.usual_names import INPUT_IDS
from minimax_tools.errors import UsageError
from minimax_tools.model.sites import ModelSite, Site
from reports.dumps import list_lines
from reports.wording import word_shape

_HEAD = """\
# A map of {directory}, for --map.
# A place is MODULE, then, where needed, :input or :output (the default) and which of several, [START:STOP] to cut each
# rank's tensor along its last dim, and @shard(DIM), @replicate or @partial for how ranks' pieces make it up, as in
# "layers.{{layer}}.self_attn.qkv_proj:output[0][0:768]@shard(-1)". Terms are added up by {{sum: [PLACE, PLACE]}}.
format: {format}
# ranks: {num_ranks}
# steps: {steps}  # the passes to read, an inner list for passes that follow each other
# lengths: [48, 33]  # real tokens of each prompt; else the golden's
# padding: right
# Below, what a token holds at each site, to know it by: H hidden, N heads, K kv heads, D head_dim, E experts, k chosen
# ones, V vocabulary.
"""
_WIDTHS: dict[Site | ModelSite | str, str] = {
    **dict.fromkeys(Site, "H"),
    Site.INPUT: "H, what the layer is fed",
    Site.ATTN_DELTA: "H, what attention adds to the residual stream",
    Site.ATTN_RESIDUAL: "H, the stream with that",
    Site.MOE_DELTA: "H, what the experts add to it",
    Site.OUTPUT: "H, the stream with that",
    **dict.fromkeys((Site.Q_PROJ, Site.Q_NORM), "N*D"),
    Site.ATTN_CONTEXT: "N*D, the input of attention's output projection",
    **dict.fromkeys((Site.K_PROJ, Site.V_PROJ, Site.K_NORM), "K*D"),
    **dict.fromkeys((Site.Q_ROPE, Site.K_ROPE), "heads, then tokens, then D"),
    Site.ROUTER_LOGITS: "E",
    **dict.fromkeys((Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS), "k"),
    ModelSite.EMBEDDING: "H",
    ModelSite.FINAL_NORM: "H",
    ModelSite.LOGITS: "V",
    INPUT_IDS: "one number",
}


def map_template_of(source: CaptureSource) -> str:
    """The template of a dump's map: it says what is known already, and has a line to fill in for every other site.

    Raises:
        UsageError: The capture is mm2's own, whose sites have names.
    """
    if not isinstance(source, ForeignCapture):
        raise UsageError(
            f"{source.directory} was not written by another tool", next_step="Only others' dumps need a map."
        )
    return "\n".join(_write_lines(source)) + "\n"


def _write_lines(source: ForeignCapture) -> Iterator[str]:
    yield (
        _HEAD.format(
            directory=source.directory,
            format=source.dump.format,
            num_ranks=source.findings.num_ranks,
            steps=[list(group) for group in source.findings.passes],
        )
        + "sites:"
    )
    found = {site for _, site in source.findings.sites}
    for site, width in _WIDTHS.items():
        if site in found:
            yield f"  # {site} was found"
        else:
            yield f'  # {site}: ""  # {width}'
    yield "# What the dump holds:"
    for line in sorted(list_lines(source), key=lambda line: bool(line.sites)):
        shape = word_shape(line.shapes[0])
        mapped = f"  ({', '.join(line.sites)})" if line.sites else ""
        yield f'#   "{line.name}"  {shape} {line.dtypes[0]}{mapped}'
