"""Views: a capture as ports show it that hide some of its sites."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from minimax_tools.capture.reader import Capture
from minimax_tools.model.sites import Site

_OUTPUTS = frozenset({Site.INPUT, Site.OUTPUT})


def hide_sites(capture: Capture, hidden: Collection[Site]) -> Capture:
    """Return the same capture of a port that does not show some sites of its layers; what lies outside them stays."""
    names = {str(site) for site in hidden}
    manifest = replace(
        capture.manifest,
        entries=tuple(
            entry for entry in capture.manifest.entries if entry.layer is None or entry.site not in names
        ),
        not_exposed={layer: _not_exposed(capture, layer, hidden) for layer in capture.layers},
    )
    return Capture(capture.directory, manifest)


def as_black_box(capture: Capture) -> Capture:
    """Return the same capture of a port that shows of its layers the output and nothing else."""
    return hide_sites(capture, [site for site in Site if site not in _OUTPUTS])


def _not_exposed(capture: Capture, layer: int, hidden: Collection[Site]) -> tuple[Site, ...]:
    already = capture.not_exposed(layer)
    return tuple(
        site
        for site in capture.description.run.sites
        if site is not Site.INPUT and (site in hidden or site in already)
    )
