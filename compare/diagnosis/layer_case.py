"""LayerCase: one layer of two captures and its weights, from which its hypotheses are judged.

B batch, S sequence, T real tokens, F channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from compare.diagnosis.catalogue.fp8 import is_fp8
from compare.diagnosis.evaluation import STAGES, Evaluation, GraphNode, LayerInputs, with_given
from compare.diagnosis.layer_weights import LayerWeights
from compare.diagnosis.trial import Trial, settled_tokens
from compare.diagnosis.yardstick import Yardstick
from compare.sides.batch import Batch, spread_evenly
from compare.sides.captured_input import fed_sites
from compare.sides.golden_weights import GoldenWeights
from compare.sides.pairing import find_mismatch
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import IncomparableError
from minimax_tools.model.inputs import decoded_rows
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec

# Their values are choices, or lie in an order of the port's own.
_NOT_JUDGED = (Site.INPUT, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS)
# Of the router's logits, where the golden does not keep them.
_RELATIVE_LOGIT_NOISE = 5e-3


class LayerCase:
    """A layer of two captures, and its weights.

    Args:
        reference: The golden, with the layer's input.
        is_inherited: Whether the run's input of the layer is another layer's output, and not the golden's.
        suspects: The sites that are to blame; empty where none is known.

    Raises:
        IncomparableError: The sides have no site in common that could judge.
    """

    def __init__(
        self,
        reference: CaptureSource,
        target: CaptureSource,
        *,
        weights: GoldenWeights,
        layer: int,
        suspects: frozenset[Site],
        is_inherited: bool = False,
    ) -> None:
        self._is_inherited = is_inherited
        self._reference = reference
        self._target = target
        self._layer = layer
        self.sites = judging_sites(reference, target, layer, suspects)
        self.scene = _make_scene(reference, target, LayerWeights(weights.tensors), weights.spec)
        self._port = {site: self._batch.rows(target.read(layer, site), site).float() for site in self.sites}
        self._is_usable = torch.stack([rows.isfinite().all(-1) for rows in self._port.values()]).all(0)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on mistakes that were not tried, and tokens that were not judged."""
        notes = []
        if self._is_inherited:
            notes.append(
                "its input is the output of other layers: every hypothesis was run on the port's own input, and "
                "mistakes fainter than the noise were not tried"
            )
        if not is_fp8(self.scene):
            notes.append(
                "the checkpoint stores no FP8 weights: mistakes of FP8 codes and scales were not tried"
            )
        num_lost = int((~self._is_usable).sum())
        if num_lost:
            notes.append(
                f"{num_lost} of {len(self.scene.real_tokens)} tokens hold NaN or Inf and were left out: "
                "no mistake of the catalogue makes any"
            )
        return tuple(notes)

    def open_trial(self) -> Trial:
        """Build the trial of the layer's hypotheses, on all real tokens."""
        tokens, reference, layer = self.scene.real_tokens, self._reference, self._layer
        given = _read_given(reference, self._target, layer)
        stages = with_given(STAGES, given)
        right = Evaluation(self.scene, stages, tokens=tokens)
        noise = _logit_noise(reference, right, self._batch, layer)
        settled = settled_tokens(right, noise)
        base = right if not self._is_inherited else self._evaluate_on_port_input(given)
        length = self.scene.attention_mask.shape[1]
        return Trial(
            base=base,
            on_golden_values=None
            if self._is_inherited
            else Evaluation(self.scene, stages, tokens=tokens, values=self._read_all()),
            yardsticks={
                site: Yardstick.of(
                    port=rows,
                    golden=self._read_golden(site, right=right, base=base),
                    exact=base.rows(site),
                    settled=settled,
                    dtype=self.scene.weights.dtype,
                )
                for site, rows in self._port.items()
            },
            logit_noise=noise,
            is_decoded=tokens % length >= self.scene.decode_start,
            is_usable=self._is_usable,
        )

    def _evaluate_on_port_input(self, given: Mapping[Site, torch.Tensor]) -> Evaluation:
        """Evaluate the right layer on the port's input."""
        # Padding may hold NaN, and zero times NaN is NaN.
        is_padding = self.scene.attention_mask == 0
        port_input = _widened(self._target.read(self._layer, Site.INPUT)).masked_fill(
            is_padding[..., None], 0.0
        )
        stages = with_given(STAGES, {**given, Site.INPUT: port_input})
        return Evaluation(self.scene, stages, tokens=self.scene.real_tokens)

    def _read_golden(self, site: Site, *, right: Evaluation, base: Evaluation) -> torch.Tensor:
        """Return the golden's rows, float32 [T,F]; moved to the port's input where the layer inherits errors.

        The golden's measured noise stays the unit, as on its own input: `PortInputGolden` has another one.
        """
        golden = self._batch.rows(self._reference.read(self._layer, site), site).float()
        return golden if base is right else golden - right.rows(site) + base.rows(site)

    @property
    def _batch(self) -> Batch:
        return Batch(self.scene.attention_mask)

    def _read_all(self) -> dict[GraphNode, torch.Tensor]:
        """Read the values that the golden holds of the layer, but for its output."""
        values: dict[GraphNode, torch.Tensor] = {}
        for site in self._reference.sites(self._layer):
            value = _widened(self._reference.read(self._layer, site))
            if site.order < Site.ATTN_CONTEXT.order:
                values[site] = value
            elif site is not Site.OUTPUT:
                values[site] = self._batch.rows(value, site)
        return values


def judging_sites(
    reference: CaptureSource, target: CaptureSource, layer: int, suspects: frozenset[Site]
) -> tuple[Site, ...]:
    """Return the sites that judge a layer: the suspects that both sides hold, and the last one of the run.

    A router is judged by what the experts give; a layer without suspects by its deltas too.

    Raises:
        IncomparableError: Both sides hold none.
    """
    given = fed_sites(target)
    both = [
        site
        for site in reference.sites(layer)
        if site in target.sites(layer)
        and site not in _NOT_JUDGED
        and site not in given
        and find_mismatch(reference.read(layer, site), target.read(layer, site)) is None
    ]
    if not both:
        raise IncomparableError(
            f"nothing of layer {layer} can be judged: the captures have no site in common, or of another shape",
            next_step="Capture the layer's output on both sides.",
        )
    wanted = set(suspects) or {Site.ATTN_DELTA, Site.MOE_DELTA}
    if wanted & {Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS}:
        wanted.add(Site.MOE_DELTA)
    return tuple(site for site in both if site in wanted or site is both[-1])


def _make_scene(
    reference: CaptureSource, target: CaptureSource, weights: LayerWeights, spec: ModelSpec
) -> LayerInputs:
    inputs, description = reference.read_inputs(), target.known_description
    num_decoded = description.run.decode_rows if description is not None else 0
    mask = inputs.attention_mask
    return LayerInputs(
        spec=spec,
        weights=weights,
        attention_mask=mask,
        position_ids=inputs.position_ids,
        decode_start=decoded_rows(mask, num_decoded).start if num_decoded else mask.shape[1],
    )


def _read_given(reference: CaptureSource, target: CaptureSource, layer: int) -> dict[Site, torch.Tensor]:
    """Read the golden's values of the layer's input and of all that the run was given."""
    return {site: _widened(reference.read(layer, site)) for site in {Site.INPUT, *fed_sites(target)}}


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value.long()


def _logit_noise(reference: CaptureSource, base: Evaluation, batch: Batch, layer: int) -> float:
    """Return the standard deviation of the golden's error on the router's logits."""
    exact = base[Site.ROUTER_LOGITS]
    if Site.ROUTER_LOGITS in reference.sites(layer):
        golden = batch.rows(reference.read(layer, Site.ROUTER_LOGITS), Site.ROUTER_LOGITS).float()
        return float((golden - exact).square().mean().sqrt())
    return _RELATIVE_LOGIT_NOISE * float(exact.square().mean().sqrt())


def spread_places(num_tokens: int, lengths: Iterable[int], most: int) -> torch.Tensor:
    """Choose tokens, evenly spread, and the last of each prompt: places, ascending."""
    if num_tokens <= 1.5 * most:
        return torch.arange(num_tokens)
    last = torch.tensor(list(lengths)).cumsum(0) - 1
    even = spread_evenly(num_tokens, most - min(len(last), most // 2))
    places: torch.Tensor = torch.cat((even, last[: most // 2])).unique()
    return places
