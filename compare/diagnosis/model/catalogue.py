"""The catalogue of mistakes outside the layers, by name; if two explain a site alike, the earlier is named first."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from compare.diagnosis.model.embedding import EMBEDDING_MISTAKES
from compare.diagnosis.model.final_norm import FINAL_NORM_MISTAKES
from compare.diagnosis.model.head import HEAD_MISTAKES
from compare.diagnosis.model.mistake import ModelMistake

MODEL_CATALOGUE: Mapping[str, ModelMistake] = MappingProxyType(
    {entry.name: entry for entry in (*EMBEDDING_MISTAKES, *FINAL_NORM_MISTAKES, *HEAD_MISTAKES)}
)


def find_model_mistakes(names: tuple[str, ...]) -> tuple[ModelMistake, ...]:
    """Return the mistakes of these names that lie outside the layers; all of them if no name is given.

    Other names are passed over: `find_mistakes` has refused unknown ones.
    """
    if not names:
        return tuple(MODEL_CATALOGUE.values())
    return tuple(MODEL_CATALOGUE[name] for name in names if name in MODEL_CATALOGUE)
