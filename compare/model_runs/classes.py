"""Classes: modules of a whole port that another device gets in another class, which its run did not judge."""

from __future__ import annotations

from collections import defaultdict

from minimax_tools.capture.passes import ModelPasses
from minimax_tools.errors import list_names
from minimax_tools.results.model_findings import ModelFinding

_SITE = "classes"
# Of the layers, the first stands for all.
_FIRST_LAYER, _EACH_LAYER = "layers.0.", "layers.*."
_MOST_NAMED = 6


def judge_classes(passes: ModelPasses) -> ModelFinding | None:
    """Warn of modules that the device gets in another class; None if there are none, or nobody looked."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, pair in (passes.other_classes or {}).items():
        here, there = pair
        places[here, there].append(path.replace(_FIRST_LAYER, _EACH_LAYER, 1))
    if not places:
        return None
    return ModelFinding(
        number=None,
        layer=None,
        sites=(_SITE,),
        reason="; ".join(_word(here, there, paths) for (here, there), paths in places.items()),
        mistake="class_of_the_cpu",
        what="The run had classes of the CPU where the device has others.",
        look_at="where the port chooses a class by its device; run on the device too",
        is_warning=True,
    )


def _word(here: str, there: str, paths: list[str]) -> str:
    where = list_names(paths, most=_MOST_NAMED)
    if not there:
        return f"the device has no {where}, a {here} in this run"
    ran = f"this run had {here}" if here else "this run had none"
    return f"the device gets {there} for {where}, where {ran}: that class is not judged here"
