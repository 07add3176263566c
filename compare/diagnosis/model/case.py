"""SiteCase: one site outside the layers, from two captures and the checkpoint, by which its mistakes are judged.

B batch, S sequence, T judged tokens, H hidden, C judged columns of the vocabulary, F channels: H or C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from compare.diagnosis.layer_case import spread_places
from compare.diagnosis.mistake import Parameters
from compare.diagnosis.model.embedding import embed
from compare.diagnosis.model.final_norm import norm_states
from compare.diagnosis.model.head import score, score_states
from compare.diagnosis.model.mistake import ModelMistake
from compare.diagnosis.model.scene import ModelScene, Unit
from compare.diagnosis.model.weights import ModelWeights
from compare.noise.squared_errors import TINY_FLOAT32
from compare.sides.batch import Batch
from compare.sides.golden_weights import GoldenWeights
from compare.sides.pairing import find_mismatch
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.sites import ModelSite, Site

# Of one rounding, relative to the values; float32 sums in another order.
_ROUNDING = {torch.bfloat16: 1.7e-3, torch.float32: 2e-6}
_MOST_TOKENS = {ModelSite.EMBEDDING: 512, ModelSite.FINAL_NORM: 512, ModelSite.LOGITS: 64}
_MOST_COLUMNS = 8192
# Less is a tensor that was not loaded rather than one that is scaled.
_LEAST_FACTOR = 1e-6
_RIGHT = {ModelSite.EMBEDDING: embed, ModelSite.FINAL_NORM: norm_states, ModelSite.LOGITS: score}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiteCase:
    """A site outside the layers, with both sides' values.

    Args:
        scene: What the port computed it from.
        port: What the port gave, float32 [T,F].
        right: What a right port gives there, float32 [T,F].
        unit: What noise comes to.
        is_through_norm: Whether logits are judged from the last layer's output, as the final norm is not held.
        notes: What could not be judged.
    """

    site: ModelSite
    scene: ModelScene
    port: torch.Tensor
    right: torch.Tensor
    unit: Unit
    is_through_norm: bool = False
    notes: tuple[str, ...] = ()

    def may_have(self, mistake: ModelMistake) -> bool:
        """Return whether a mistake can show here: one of the final norm does at logits where it is not held."""
        return mistake.site is self.site or (self.is_through_norm and mistake.site is ModelSite.FINAL_NORM)

    def predict(self, mistake: ModelMistake, parameters: Parameters) -> torch.Tensor | None:
        """Compute the site's values [T,F] with a mistake; None where it cannot happen here."""
        if mistake.site is self.site:
            return mistake.predict(self.scene, self.right, **parameters)
        prediction = mistake.predict(self.scene, norm_states(self.scene), **parameters)
        return None if prediction is None else score_states(self.scene, self.scene.rounded(prediction))

    def candidates(self, mistake: ModelMistake) -> tuple[Parameters, ...]:
        """Return the parameters to try: those of the catalogue, and the factor that fits the port best."""
        found = mistake.candidates(self.scene)
        # At the logits nothing tells a scaled norm from a scaled head.
        if not mistake.fits_factor or mistake.site is not self.site:
            return found
        factor = float((self.port * self.right).sum() / self.right.square().sum().clamp(min=TINY_FLOAT32))
        if not math.isfinite(factor) or abs(factor) <= _LEAST_FACTOR:
            return found
        return (*found, MappingProxyType({"factor": factor}))


class ModelCases:
    """Opens sites outside the layers.

    Args:
        batch: The tokens that they have in common.
        last_layer: The layer before the head.
        weights: Any layer's; what lies outside the layers is read from the same checkpoint.
    """

    def __init__(
        self,
        golden: CaptureSource,
        target: CaptureSource,
        *,
        batch: Batch,
        last_layer: int,
        weights: GoldenWeights,
    ) -> None:
        self._golden, self._target, self._batch = golden, target, batch
        self._last_layer = last_layer
        self._spec = weights.spec
        self._dtype = weights.tensors.dtype
        self._weights = ModelWeights(weights.tensors.reader, weights.spec, dtype=self._dtype)
        generator = torch.Generator().manual_seed(0)
        columns = torch.randperm(weights.spec.vocab_size, generator=generator)[:_MOST_COLUMNS]
        self._columns = columns.sort().values

    def open(self, site: ModelSite) -> SiteCase | str:
        """Open a site that both sides hold; why it cannot be judged, in words, where that is so."""
        golden, port = self._golden.read_model(site), self._target.read_model(site)
        mismatch = find_mismatch(golden, port)
        if mismatch is not None:
            return mismatch
        has_norm = ModelSite.FINAL_NORM in self._target.model_sites()
        scenes = [self._scene(side, has_norm=has_norm) for side in (self._golden, self._target)]
        if any(_lacks_input(scene, site) for scene in scenes):
            return "its input is not held"
        values = [self._values(tensor, site) for tensor in (golden, port)]
        inputs = [rows for scene in scenes for rows in (scene.states, scene.normed) if rows is not None]
        finite = torch.stack([rows.isfinite().all(dim=-1) for rows in (*values, *inputs)]).all(dim=0)
        usable = finite & self._held(site, has_norm=has_norm)
        if not bool(usable.any()):
            return "no token of it is held and finite"
        places = usable.nonzero()[:, 0]
        places = places[spread_places(len(places), [len(places)], _MOST_TOKENS[site])]
        golden_scene, port_scene = (_at(scene, places) for scene in scenes)
        exact, right = (_RIGHT[site](scene) for scene in (golden_scene, port_scene))
        unit = Unit.of(values[0][places], exact, rounding=_ROUNDING[self._dtype])
        num_lost = int((~values[1].isfinite().all(dim=-1)).sum())
        lost = f"{num_lost} tokens hold NaN or Inf and were left out: no mistake of the catalogue makes any"
        return SiteCase(
            site=site,
            scene=port_scene,
            port=values[1][places],
            right=right,
            unit=unit,
            is_through_norm=site is ModelSite.LOGITS and not has_norm,
            notes=(lost,) if num_lost else (),
        )

    def _values(self, tensor: torch.Tensor, site: ModelSite) -> torch.Tensor:
        """Return a site's real rows, float32 [T,F]."""
        rows = self._batch.rows(tensor, site)
        return (rows[:, self._columns] if site is ModelSite.LOGITS else rows).float()

    def _scene(self, side: CaptureSource, *, has_norm: bool) -> ModelScene:
        """Return what one side computed from, all real tokens; the final norm computed where the port lacks it."""
        inputs = self._golden.read_inputs()
        ids = inputs.input_ids[inputs.attention_mask.bool()]
        prompts = inputs.attention_mask.bool().nonzero()[:, 0]
        here = torch.arange(len(ids))
        before = torch.where((prompts == prompts.roll(1)) & (here > 0), here - 1, -1)
        scene = ModelScene(
            spec=self._spec,
            weights=self._weights,
            columns=self._columns,
            dtype=self._dtype,
            token_ids=ids,
            before=before,
            all_ids=ids,
            states=self._states(side),
        )
        if has_norm and ModelSite.FINAL_NORM in side.model_sites():
            normed = self._values(side.read_model(ModelSite.FINAL_NORM), ModelSite.FINAL_NORM)
        elif scene.states is not None:
            normed = scene.rounded(norm_states(scene))
        else:
            return scene
        return replace(scene, normed=normed, all_normed=normed)

    def _states(self, side: CaptureSource) -> torch.Tensor | None:
        if self._last_layer + 1 != self._spec.num_hidden_layers or Site.OUTPUT not in side.sites(
            self._last_layer
        ):
            return None
        return self._batch.rows(side.read(self._last_layer, Site.OUTPUT), Site.OUTPUT).float()

    def _held(self, site: ModelSite, *, has_norm: bool) -> torch.Tensor:
        """Find tokens of which the port holds the site and its inputs, bool [T]."""
        sites = (site, ModelSite.FINAL_NORM) if site is ModelSite.LOGITS and has_norm else (site,)
        held = torch.ones(int(self._golden.read_inputs().attention_mask.sum()), dtype=torch.bool)
        for one in sites:
            places = self._target.held_rows(one)
            if places is not None:
                held &= self._batch.tokens(places)
        return held


def _lacks_input(scene: ModelScene, site: ModelSite) -> bool:
    if site is ModelSite.FINAL_NORM:
        return scene.states is None
    return site is ModelSite.LOGITS and scene.normed is None


def _at(scene: ModelScene, places: torch.Tensor) -> ModelScene:
    """Select some of a scene's tokens, by their places."""
    return replace(
        scene,
        token_ids=scene.token_ids[places],
        before=scene.before[places],
        states=None if scene.states is None else scene.states[places],
        normed=None if scene.normed is None else scene.normed[places],
    )
