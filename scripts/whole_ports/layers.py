"""A whole port with a mistake in one layer. Environment variables choose both: they are set for each run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from faults.model_ports import LAYER_VARIABLE, MISTAKE_VARIABLE
from faults.planted import MISTAKES
from faults.port import PlantedLayer
from model_port import Model


class WrongLayer(Model):
    """The right port, with another layer in one place."""

    def __init__(self, config):
        super().__init__(config)
        (plant,) = (plant for plant in MISTAKES if str(plant) == os.environ[MISTAKE_VARIABLE])
        layer = int(os.environ[LAYER_VARIABLE])
        self.model.layers[layer] = PlantedLayer(config, layer, plant)
