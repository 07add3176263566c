"""Which mistakes can be told apart: how far they are from the right layer and from each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from compare.diagnosis.catalogue.catalogue import find_mistakes
from compare.diagnosis.layer_case import LayerCase
from compare.diagnosis.mistake import Parameters
from minimax_tools.capture.source import CaptureSource
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Separation:
    """Distances between float32 outputs of a layer, in units of ‖BF16 − float32‖ of the golden.

    Args:
        effects: Of each mistake, its distance from the right layer.
        distances: Of two mistakes, from each other.
    """

    effects: Mapping[str, float]
    distances: Mapping[tuple[str, str], float]

    def look_alikes(self, label: str) -> tuple[str, ...]:
        """The other mistakes whose outputs differ from this one's by less than the noise floor."""
        return tuple(
            second
            for (first, second), distance in self.distances.items()
            if first == label and distance < 1.0
        )


def separate(
    reference: CaptureSource,
    *,
    model: Path,
    layer: int,
    hypotheses: Mapping[str, tuple[str, Parameters]],
    site: Site = Site.OUTPUT,
) -> Separation:
    """Tell which mistakes can be told apart at a site of a layer, on the golden's input.

    Args:
        reference: The golden.
        model: The checkpoint's folder.
        layer: The layer.
        hypotheses: Names of mistakes of the catalogue and their parameters, by a label of the caller's.
        site: Where; all but the router's experts and weights.

    Raises:
        UsageError: A mistake is not in the catalogue.
        CheckpointError: The checkpoint cannot be read.
    """
    labels = tuple(hypotheses)
    chosen = [
        find_mistakes((name,))[0].with_parameters(parameters) for name, parameters in hypotheses.values()
    ]
    with CheckpointReader(model, layers=range(layer, layer + 1)) as reader, torch.no_grad():
        case = LayerCase(
            reference,
            reference,
            reader=reader,
            spec=ModelSpec.from_folder(model),
            layer=layer,
            suspects=frozenset({site}),
        )
        trial = case.open_trial()
        settled, yardstick = trial.settled, trial.yardsticks[site]
        rows = [evaluation.rows(site)[settled] for _, evaluation in trial.evaluate(chosen)]
        exact = yardstick.exact[settled]
        floor = float((yardstick.golden[settled] - exact).norm())
    return Separation(
        effects={label: float((own - exact).norm()) / floor for label, own in zip(labels, rows, strict=True)},
        distances={
            (first, second): float((own - other).norm()) / floor
            for first, own in zip(labels, rows, strict=True)
            for second, other in zip(labels, rows, strict=True)
            if first != second
        },
    )
