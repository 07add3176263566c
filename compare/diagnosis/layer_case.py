"""LayerCase: one layer of two captures and its weights, from which its hypotheses are judged.

B batch, S sequence, T real tokens, F channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch

from compare.catalogue.misread import has_fp8_weights
from compare.diagnosis.trial import Trial, settled_tokens
from compare.noise.yardstick import Yardstick
from compare.sides.captured_input import fed_sites
from compare.sides.golden_weights import GoldenWeights
from compare.sides.pairing import find_mismatch
from compare.sides.sides import Batch, spread_evenly
from minimax_tools.capture.reader import MIXED_SITES
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import IncomparableError
from minimax_tools.model.inputs import decoded_columns, decoded_tokens
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.evaluation import (
    CHOICES,
    Evaluation,
    GraphNode,
    LayerInputs,
    choice_rows,
    finite_padding,
    with_given,
)
from minimax_tools.reference.expert_pass import LayerWeights

# Sites at which some mistakes begin beside others: where they are shown, and right, such a mistake is none.
_CONTROLS = frozenset(
    {
        *(Site.INPUT_NORM, Site.POST_NORM, Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ),
        *(Site.Q_NORM, Site.K_NORM, Site.Q_ROPE, Site.K_ROPE, *CHOICES),
    }
)
# Noise of the router's logits over their RMS, for a golden that does not keep them.
_RELATIVE_LOGIT_NOISE = 5e-3


class LayerCase:
    """A layer of two captures, and its weights in the golden's checkpoint.

    The golden (`reference`) holds the layer's input. `suspects` are blamed sites; empty if none is known. `judging`
    are the sites that judge; None to choose them by the suspects. If `is_inherited`, the port's input of the layer is
    another layer's output, and not the golden's. The port's values of the `own` sites stand in for their stages too.

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
        judging: tuple[Site, ...] | None = None,
        own: frozenset[Site] = frozenset(),
    ) -> None:
        self._is_inherited = is_inherited
        self._own = own | {Site.INPUT} if is_inherited else own
        if reference.keeps_last_tokens:
            # Other tokens read them, and they are not stored of every token.
            self._own -= MIXED_SITES
        self._reference = reference
        self._target = target
        self._layer = layer
        self.sites = _judging_sites(reference, target, layer, suspects) if judging is None else judging
        self.inputs = _read_inputs(reference, target, LayerWeights(weights.tensors), weights.spec)
        shown = comparable_sites(reference, target, layer) - set(self.sites)
        self._controls = (
            _CONTROLS & shown if Site.ROUTER_EXPERTS in shown else _CONTROLS & shown - set(CHOICES)
        )
        self._is_usable = torch.stack(
            [self._read_rows(target, site).isfinite().all(-1) for site in self.sites]
        ).all(0)
        self._is_usable &= ~self._find_decoded_by_row()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on mistakes that were not tried, and tokens that were not judged."""
        notes = []
        if self._is_inherited:
            notes.append(
                "its input is the output of other layers: every hypothesis was run on the port's own input, and "
                "mistakes fainter than the noise were not tried"
            )
        if not has_fp8_weights(self.inputs):
            notes.append(
                "the checkpoint stores no FP8 weights: mistakes of FP8 codes and scales were not tried"
            )
        num_lost = int((~self._is_usable & ~self._find_decoded_by_row()).sum())
        if num_lost:
            notes.append(
                f"{num_lost} of {len(self.inputs.judged_tokens)} tokens hold NaN or Inf and were left out: "
                "no mistake of the catalogue makes any"
            )
        return tuple(notes)

    def open_trial(self) -> Trial:
        """Build the trial of the layer's hypotheses, on all real tokens.

        Up to three evaluations of the right layer are made: on the golden's input, to measure the noise; the `base` on
        the port's own values, if there are any; else `on_golden_values`, for faint mistakes (see `Trial`).
        """
        tokens, reference, layer = self.inputs.judged_tokens, self._reference, self._layer
        given = _read_given(reference, self._target, layer)  # these values stand in for their stages
        on_golden_input = Evaluation(self.inputs, with_given(given), tokens=tokens)
        logit_noise = _logit_noise(reference, on_golden_input, self._batch, layer)
        settled = settled_tokens(on_golden_input, logit_noise)  # whose experts no such noise changes
        base, on_golden_values = on_golden_input, None
        if self._own:
            base = self._evaluate_on_own_values(given)
        else:
            on_golden_values = Evaluation(
                self.inputs, with_given(given), tokens=tokens, values=self._read_golden_values()
            )

        def measure(site: Site) -> Yardstick:
            of = partial(Yardstick.of_choice, site) if site in CHOICES else partial(Yardstick.of, dtype=dtype)
            return of(
                port=self._read_rows(self._target, site),
                golden=self._read_golden_rows(site, on_golden_input=on_golden_input, base=base),
                exact=base.rows(site),
                settled=settled,
            )

        dtype = self.inputs.weights.dtype
        return Trial(
            base=base,
            on_golden_values=on_golden_values,
            yardsticks={site: measure(site) for site in self.sites},
            controls={site: measure(site) for site in self._controls},
            logit_noise=logit_noise,
            is_decoded=tokens % self.inputs.attention_mask.shape[1] >= self.inputs.decode_start,
            is_usable=self._is_usable,
        )

    def _evaluate_on_own_values(self, given: Mapping[Site, torch.Tensor]) -> Evaluation:
        mask = self.inputs.attention_mask
        own = {site: finite_padding(self._target.read(self._layer, site), site, mask) for site in self._own}
        return Evaluation(self.inputs, with_given({**given, **own}), tokens=self.inputs.judged_tokens)

    def _read_golden_rows(self, site: Site, *, on_golden_input: Evaluation, base: Evaluation) -> torch.Tensor:
        """Return the golden's rows, float32 [T,F]; moved to the port's own values if the layer is evaluated on these.

        Moved rows are the base plus the golden's rounding errors, so the measured noise is that of the golden.
        """
        golden = self._read_rows(self._reference, site)
        return golden if base is on_golden_input else golden - on_golden_input.rows(site) + base.rows(site)

    def _read_rows(self, side: CaptureSource, site: Site) -> torch.Tensor:
        """Read a side's values at a judging site, float32 [T,F]; of the router's choice as `choice_rows` gives them."""
        rows = self._batch.rows(side.read(self._layer, site), site)
        if site not in CHOICES:
            return rows.float()
        is_weights = site is Site.ROUTER_WEIGHTS
        experts = self._batch.rows(side.read(self._layer, Site.ROUTER_EXPERTS), Site.ROUTER_EXPERTS)
        return choice_rows(experts, rows if is_weights else None, self.inputs.spec.num_local_experts)

    def _find_decoded_by_row(self) -> torch.Tensor:
        """Find tokens that a whole port decoded from its own cache, bool [T]: no hypothesis here knows that cache."""
        mask, description = self.inputs.attention_mask, self._target.known_description
        run = None if description is None else description.run
        num_tokens = run.num_decoded if run is not None and run.decodes_by_row else 0
        return self._batch.tokens(decoded_tokens(mask, num_tokens, by_row=True))

    @property
    def _batch(self) -> Batch:
        return Batch(self.inputs.is_judged)

    def _read_golden_values(self) -> dict[GraphNode, torch.Tensor]:
        """Read the golden's values of the layer, except its output: from attn_context on, of the real tokens alone."""
        values: dict[GraphNode, torch.Tensor] = {}
        for site in self._reference.sites(self._layer):
            if self._reference.keeps_last_tokens and site in MIXED_SITES:
                continue
            value = _upcast(self._reference.read(self._layer, site))
            if site.order < Site.ATTN_CONTEXT.order:
                values[site] = value
            elif site is not Site.OUTPUT:
                values[site] = self._batch.rows(value, site)
        return values


def _judging_sites(
    reference: CaptureSource, target: CaptureSource, layer: int, suspects: frozenset[Site]
) -> tuple[Site, ...]:
    """Return the sites that judge a layer: the suspects that both sides hold, else the nearest site behind them."""
    given = fed_sites(target)  # sites whose golden values the run was given
    common = sorted(
        comparable_sites(reference, target, layer) - {Site.INPUT, *given}, key=lambda site: site.order
    )
    if Site.ROUTER_EXPERTS not in common:
        # Weights in any order say nothing without the experts that they are of.
        common = [site for site in common if site is not Site.ROUTER_WEIGHTS]
    if not common:
        raise IncomparableError(
            f"nothing of layer {layer} can be judged: the captures have no site in common, or of another shape",
            next_step="Capture the layer's output on both sides.",
        )
    if not suspects:
        return tuple(
            site for site in common if site in (Site.ATTN_DELTA, Site.MOE_DELTA, Site.MLP_DELTA, common[-1])
        )
    judging = [site for site in common if site in suspects]
    behind = [site for site in common if site.order > max(suspect.order for suspect in suspects)]
    return tuple(judging or behind[:1] or common[-1:])


def comparable_sites(reference: CaptureSource, target: CaptureSource, layer: int) -> frozenset[Site]:
    """Return the sites of a layer that both sides hold, in one shape."""
    return frozenset(
        site
        for site in reference.sites(layer)
        if site in target.sites(layer)
        and find_mismatch(reference.read(layer, site), target.read(layer, site)) is None
    )


def _read_inputs(
    reference: CaptureSource, target: CaptureSource, weights: LayerWeights, spec: ModelSpec
) -> LayerInputs:
    tokens, description = reference.read_inputs(), target.known_description
    # A whole port decodes from its own cache: its decoded tokens are not judged here.
    is_by_column = description is not None and not description.run.decodes_by_row
    num_decoded = description.run.num_decoded if description is not None and is_by_column else 0
    mask = tokens.attention_mask
    return LayerInputs(
        spec=spec,
        graph=weights.graph(spec),
        weights=weights,
        attention_mask=mask,
        position_ids=tokens.position_ids,
        decode_start=decoded_columns(mask, num_decoded).start if num_decoded else mask.shape[1],
        calls=() if description is None else description.calls,
        is_kept=tokens.is_kept,
    )


def _read_given(reference: CaptureSource, target: CaptureSource, layer: int) -> dict[Site, torch.Tensor]:
    return {site: _upcast(reference.read(layer, site)) for site in {Site.INPUT, *fed_sites(target)}}


def _upcast(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value.long()


def _logit_noise(reference: CaptureSource, base: Evaluation, batch: Batch, layer: int) -> float:
    if base.graph.is_dense:
        return 0.0
    exact = base[Site.ROUTER_LOGITS]
    if Site.ROUTER_LOGITS in reference.sites(layer):
        golden = batch.rows(reference.read(layer, Site.ROUTER_LOGITS), Site.ROUTER_LOGITS).float()
        return float((golden - exact).square().mean().sqrt())
    return _RELATIVE_LOGIT_NOISE * float(exact.square().mean().sqrt())


def spread_tokens(num_tokens: int, lengths: Iterable[int], most: int) -> torch.Tensor:
    """Choose about `most` tokens: the last token of each prompt, and others evenly spread: indices, ascending.

    The last tokens are at most half of these. All are chosen if there are at most 1.5 times as many. `lengths` are the
    numbers of tokens of the prompts.
    """
    if num_tokens <= 1.5 * most:
        return torch.arange(num_tokens)
    last = torch.tensor(list(lengths)).cumsum(0) - 1
    even = spread_evenly(num_tokens, most - min(len(last), most // 2))
    indices: torch.Tensor = torch.cat((even, last[: most // 2])).unique()
    return indices
