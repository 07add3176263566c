"""NxDI's tensor capture of a pass: the modules to capture, and the files read as sites.

A pass is padded on the right, to its bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from minimax_tools.dumps.format_names import NXDI
from minimax_tools.dumps.found_sites import FoundSite
from minimax_tools.dumps.name_map import NameMap, usual_places
from minimax_tools.dumps.nxdi import read_dump
from minimax_tools.dumps.site_finder import find_sites
from minimax_tools.dumps.tensor_file import read_tensor
from minimax_tools.model.sites import ModelSite, Site

_FIRST_LAYER = "layers.0"
# The logits come with the pass itself, and the head's captured ones would be a rank's part.
_LEFT_OUT = (ModelSite.LOGITS,)


def captured_modules(present: Iterable[str], *, num_layers: int) -> list[str]:
    """Return the modules that have sites, of all layers; `present` are those of a model, its first layer at least."""
    names = [name for name in dict.fromkeys(present) if not _is_of_later_layer(name)]
    wanted = {
        module
        for site, sources in usual_places(NXDI, has_fused_residuals=False).items()
        if isinstance(site, (Site, ModelSite)) and site not in _LEFT_OUT
        for source in sources
        for place in source
        for module in place.find_layers(names).values()
    }
    modules = []
    for name in (name for name in names if name in wanted):
        in_layer = name == _FIRST_LAYER or name.startswith(f"{_FIRST_LAYER}.")
        rest = name.removeprefix(_FIRST_LAYER)
        modules += [f"layers.{layer}{rest}" for layer in range(num_layers)] if in_layer else [name]
    return modules


def read_captured(
    directory: Path, *, batch_shape: tuple[int, int], num_ranks: int
) -> dict[str, torch.Tensor]:
    """Read the tensors of one pass as sites: [B,S,…] of `batch_shape`, by `layer_3.output` or `final_norm`.

    NxDI writes those of rank 0: sites that the ranks divide are left out.

    Raises:
        CaptureError: A file is damaged.
    """
    found = find_sites(read_dump(directory), NameMap(num_ranks=num_ranks))
    sites = {}
    for (layer, site), place in found.sites.items():
        if not isinstance(site, (Site, ModelSite)) or site in _LEFT_OUT:
            continue
        tensor = _read(directory, place, batch_shape=batch_shape)
        sites[str(site) if layer is None else f"layer_{layer}.{site}"] = tensor
    return sites


def _read(directory: Path, place: FoundSite, *, batch_shape: tuple[int, int]) -> torch.Tensor:
    """Read a site's tensor, and cut the bucket's padding off."""
    batch_size, num_columns = batch_shape
    (term,) = place.terms
    (piece,) = term.pieces.values()
    tensor = read_tensor(directory / piece.file, piece.keys)
    if tensor.ndim == 2:
        # [B·C,…]: a mixture of experts sees the tokens of all prompts one after another.
        tensor = tensor.unflatten(0, (batch_size, -1))
    return tensor[:, :num_columns]


def _is_of_later_layer(name: str) -> bool:
    return name.startswith("layers.") and name.split(".")[1] != "0"
