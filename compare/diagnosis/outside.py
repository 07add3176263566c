"""Diagnosis outside the layers: the known mistake that explains a port's embedding, final norm or logits.

B batch, S sequence, T real tokens or those judged, H hidden, C judged columns of the vocabulary, F channels: H or C.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from compare.catalogue.candidates import Parameters
from compare.catalogue.outside import (
    ModelInputs,
    ModelMistake,
    ModelWeights,
    embed,
    norm_states,
    score,
    score_states,
)
from compare.comparer import JudgedRun
from compare.diagnosis.finding import MistakeFinding, SiteDiagnosis
from compare.diagnosis.layer_case import spread_tokens
from compare.diagnosis.score import RESEMBLING, most_left
from compare.noise.rows import TINY_FLOAT32
from compare.noise.yardstick import RIGHT_RHO
from compare.sides.golden_weights import GoldenWeights, WeightSource
from compare.sides.pairing import find_mismatch
from compare.sides.sides import Batch, exchanged_tokens
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import SiteStatus

# Relative error of one rounding, by dtype; in float32, of a sum in another order.
_ROUNDING = {torch.bfloat16: 1.7e-3, torch.float32: 2e-6}
# Tokens, and columns of the vocabulary, that are judged at most; more would cost more time and memory.
_MOST_TOKENS = {ModelSite.EMBEDDING: 512, ModelSite.FINAL_NORM: 512, ModelSite.LOGITS: 64}
_MOST_COLUMNS = 8192
# A smaller factor is no scale: the tensor was not loaded.
_LEAST_FACTOR = 1e-6
_MOST_NEAREST = 3
# Ratio of squares of ρ below which two predictions are equally good: the catalogue's order decides between them.
_SAME = 1.02
# Added to squares of ρ: two that are zero up to float32 are equally good.
_TINY = 1e-12
# From a site's inputs to its correct values.
_CORRECT = {ModelSite.EMBEDDING: embed, ModelSite.FINAL_NORM: norm_states, ModelSite.LOGITS: score}


def diagnose_outside(
    run: JudgedRun, golden: CaptureSource, source: WeightSource, mistakes: Sequence[ModelMistake]
) -> tuple[tuple[SiteDiagnosis, ...], tuple[str, ...]]:
    """Diagnose the sites outside the layers on the port's own inputs; note failing sites that cannot be judged."""
    comparison, target = run.comparison, run.sides.target
    held = [site for site in ModelSite if site in golden.model_sites() and site in target.model_sites()]
    if not held:
        return (), ()
    blamed = {site for blame in comparison.blame if blame.layer is None for site in blame.sites}
    failing = {result.site for result in comparison.of_layer(None) if result.status is SiteStatus.FAIL}
    last = max(comparison.layers)
    diagnoses, notes = [], []
    with source.open_layer(last, golden) as weights, torch.no_grad():
        cases = ModelCases(golden, target, batch=run.sides.batch, last_layer=last, weights=weights)
        for site in held:
            if site is ModelSite.FINAL_NORM and site in failing - blamed:
                notes.append(f"{site} fails by what it is given: that is blamed, and not the norm")
                continue
            case = cases.open(site)
            if isinstance(case, SiteCase):
                diagnoses.append(search_site(case, mistakes, is_blamed=site in blamed))
            elif site in failing:
                # `case` is then the reason, in words.
                notes.append(f"{site} fails and was not diagnosed: {case}")
    return tuple(diagnoses), tuple(notes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiteNoise:
    """Noise at a site, by channel."""

    variance: torch.Tensor  # mean square of the golden's error, at least that of one rounding: float32 [F]
    size: torch.Tensor  # mean square of the golden's values, float32 [F]

    @classmethod
    def measure(cls, golden: torch.Tensor, exact: torch.Tensor, *, rounding: float) -> SiteNoise:
        """Measure the noise of the golden's values against `exact` ones, float32 from the golden's inputs: [T,F] each.

        `rounding` is the relative error of one rounding.
        """
        size = golden.square().mean(dim=0)
        # The mean over channels bounds it from below: a channel may be zero on all of these tokens.
        least = rounding**2 * torch.maximum(size, 1e-4 * size.mean()) + TINY_FLOAT32
        return cls(variance=torch.maximum((golden - exact).square().mean(dim=0), least), size=size)

    def widened(self, prediction: torch.Tensor) -> torch.Tensor:
        """Return the noise's variance [F] on values as large as a prediction [T,F]: larger values round coarser."""
        growth = prediction.square().mean(dim=0) / self.size.clamp(min=TINY_FLOAT32)
        # The upper bound is for channels in which the golden is 0: float32 could not hold their growth.
        return self.variance * growth.clamp(min=1.0, max=1e12)

    def rho(self, port: torch.Tensor, prediction: torch.Tensor) -> float:
        """Return ρ of the port's values [T,F] against a prediction; 1 is as good as the golden."""
        is_predicted = prediction.isfinite().all(dim=-1)
        if not bool(is_predicted.any()):
            return math.inf
        port, prediction = port[is_predicted], prediction[is_predicted]
        squares = (port - prediction).square() / self.widened(prediction)
        mean = float(squares.double().mean())
        return math.sqrt(mean) if math.isfinite(mean) else math.inf


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiteCase:
    """A site outside the layers, with both sides' values."""

    site: ModelSite
    inputs: ModelInputs  # the port's own inputs to the site
    port: torch.Tensor  # the port's values, float32 [T,F]
    correct: torch.Tensor  # correct values on the same inputs, float32 [T,F]
    noise: SiteNoise
    # Whether logits are judged from the last layer's output: no final norm is held.
    is_through_norm: bool = False
    notes: tuple[str, ...] = ()  # sentences on tokens that could not be judged

    def may_have(self, mistake: ModelMistake) -> bool:
        """Decide whether a mistake can show here; one of the final norm shows at the logits if that is not held."""
        return mistake.site is self.site or (self.is_through_norm and mistake.site is ModelSite.FINAL_NORM)

    def predict(self, mistake: ModelMistake, parameters: Parameters) -> torch.Tensor | None:
        """Compute the site's values [T,F] with a mistake; None if an input is not held."""
        if mistake.site is self.site:
            return mistake.predict(self.inputs, self.correct, **parameters)
        # Else the site is the logits, and the mistake one of the final norm.
        prediction = mistake.predict(self.inputs, norm_states(self.inputs), **parameters)
        return None if prediction is None else score_states(self.inputs, self.inputs.rounded(prediction))

    def candidates(self, mistake: ModelMistake) -> tuple[Parameters, ...]:
        """Return the parameters to try: those of the catalogue, and the factor that fits the port best."""
        usual = mistake.candidates(self.inputs)
        # At the logits nothing tells a scaled norm from a scaled head.
        if not mistake.fits_factor or mistake.site is not self.site:
            return usual
        factor = float((self.port * self.correct).sum() / self.correct.square().sum().clamp(min=TINY_FLOAT32))
        if not math.isfinite(factor) or abs(factor) <= _LEAST_FACTOR:
            return usual
        return (*usual, MappingProxyType({"factor": factor}))


class ModelCases:
    """Opens the sites outside the layers of a run that ends with `last_layer`; the golden is mm2's own."""

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
        """Open a site that both sides hold; return the reason, in words, if it cannot be judged."""
        golden, port = self._golden.read(None, site), self._target.read(None, site)
        mismatch = find_mismatch(golden, port)
        if mismatch is not None:
            return mismatch
        has_norm = ModelSite.FINAL_NORM in self._target.model_sites()
        golden_inputs, port_inputs = (
            self._read_inputs(side, has_norm=has_norm) for side in (self._golden, self._target)
        )
        if _lacks_input(golden_inputs, site) or _lacks_input(port_inputs, site):
            return "its input is not held"
        golden_values, port_values = self._site_values(golden, site), self._site_values(port, site)
        is_usable = self._is_held(site, has_norm=has_norm)
        for inputs, values in ((golden_inputs, golden_values), (port_inputs, port_values)):
            is_usable &= _is_finite(values) & _is_finite(inputs.states) & _is_finite(inputs.normed)
        if not bool(is_usable.any()):
            return "no token of it is held and finite"
        indices = is_usable.nonzero()[:, 0]
        # Spread as if they were one prompt.
        indices = indices[spread_tokens(len(indices), [len(indices)], _MOST_TOKENS[site])]
        golden_inputs, port_inputs = _select(golden_inputs, indices), _select(port_inputs, indices)
        num_lost = int((~port_values.isfinite().all(dim=-1)).sum())
        lost = f"{num_lost} tokens hold NaN or Inf and were left out: no mistake of the catalogue makes any"
        return SiteCase(
            site=site,
            inputs=port_inputs,
            port=port_values[indices],
            correct=_CORRECT[site](port_inputs),
            noise=SiteNoise.measure(
                golden_values[indices], _CORRECT[site](golden_inputs), rounding=_ROUNDING[self._dtype]
            ),
            is_through_norm=site is ModelSite.LOGITS and not has_norm,
            notes=(lost,) if num_lost else (),
        )

    def _read_inputs(self, side: CaptureSource, *, has_norm: bool) -> ModelInputs:
        """Read the inputs of one side, for all real tokens; without `has_norm`, the final norm is computed."""
        tokens = self._golden.read_inputs()
        is_real = tokens.is_kept
        ids = tokens.input_ids[is_real]
        prompts = is_real.nonzero()[:, 0]
        indices = torch.arange(len(ids))
        # `roll` puts each token's prompt at the next token; at the first token it puts that of the last.
        is_continued = (prompts == prompts.roll(1)) & (indices > 0)
        inputs = ModelInputs(
            spec=self._spec,
            weights=self._weights,
            columns=self._columns,
            dtype=self._dtype,
            token_ids=ids,
            all_token_ids=ids,
            previous=torch.where(is_continued, indices - 1, -1),  # the prompt's token before; -1 for none
            exchanged=self._read_exchanged(is_real),
            states=self._read_states(side),
        )
        if has_norm and ModelSite.FINAL_NORM in side.model_sites():
            normed = self._site_values(side.read(None, ModelSite.FINAL_NORM), ModelSite.FINAL_NORM)
        elif inputs.states is not None:
            normed = inputs.rounded(norm_states(inputs))
        else:
            return inputs
        return replace(inputs, normed=normed, all_normed=normed)

    def _read_exchanged(self, is_real: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return for ways to mistake tokens of a whole port's pass the other of each, among the real ones [B,S]."""
        passes = self._target.read_passes()
        if passes is None:
            return {}
        numbers = torch.where(is_real.flatten(), is_real.flatten().cumsum(0) - 1, -1)
        return {
            words: torch.where(places < 0, -1, numbers[places])[is_real]
            for words, places in exchanged_tokens(passes, is_real.long())
        }

    def _read_states(self, side: CaptureSource) -> torch.Tensor | None:
        """Read the output of the model's last layer, float32 [T,H]; None if it did not run, or is not held."""
        is_model_end = self._last_layer + 1 == self._spec.num_hidden_layers
        if not is_model_end or Site.OUTPUT not in side.sites(self._last_layer):
            return None
        return self._batch.rows(side.read(self._last_layer, Site.OUTPUT), Site.OUTPUT).float()

    def _site_values(self, tensor: torch.Tensor, site: ModelSite) -> torch.Tensor:
        """Return a site's real tokens, float32 [T,F]; at the logits the judged columns alone."""
        values = self._batch.rows(tensor, site)
        return (values[:, self._columns] if site is ModelSite.LOGITS else values).float()

    def _is_held(self, site: ModelSite, *, has_norm: bool) -> torch.Tensor:
        """Decide for each real token whether the port holds the site and its input: bool [T]."""
        needed = (site, ModelSite.FINAL_NORM) if site is ModelSite.LOGITS and has_norm else (site,)
        is_held = torch.ones(int(self._golden.read_inputs().is_kept.sum()), dtype=torch.bool)
        for needed_site in needed:
            held = self._target.held_tokens(needed_site)  # bool [B,S]; None for all tokens
            if held is not None:
                is_held &= self._batch.tokens(held)
        return is_held


def _is_finite(values: torch.Tensor | None) -> torch.Tensor:
    """Decide for each token of [T,F] whether its values are finite; tensors that are not held exclude none."""
    return torch.tensor(True) if values is None else values.isfinite().all(dim=-1)


def _lacks_input(inputs: ModelInputs, site: ModelSite) -> bool:
    """Decide whether the input of a site is not held; that of the embedding, the token ids, always is."""
    if site is ModelSite.FINAL_NORM:
        return inputs.states is None
    return site is ModelSite.LOGITS and inputs.normed is None


def _select(inputs: ModelInputs, indices: torch.Tensor) -> ModelInputs:
    """Select some of the judged tokens, by their indices among the T; what holds all real tokens stays whole."""
    return replace(
        inputs,
        token_ids=inputs.token_ids[indices],
        previous=inputs.previous[indices],
        exchanged={words: others[indices] for words, others in inputs.exchanged.items()},
        states=None if inputs.states is None else inputs.states[indices],
        normed=None if inputs.normed is None else inputs.normed[indices],
    )


def search_site(case: SiteCase, mistakes: Sequence[ModelMistake], *, is_blamed: bool) -> SiteDiagnosis:
    """Find which mistakes explain a site; if the site is right on the port's own input, none is tried."""
    null = case.noise.rho(case.port, case.correct)
    if null <= RIGHT_RHO:
        return SiteDiagnosis(site=case.site, unexplained=null, is_blamed=is_blamed, notes=case.notes)
    findings = list(_try_mistakes(case, mistakes, null))
    best = _best_of_each(findings)
    # `leaves` is ρ of the port against the prediction with the mistake, `most_left` the largest that explains.
    explaining = [finding for finding in best if finding.leaves <= most_left(null) and finding.leaves < null]
    named = [
        finding
        for finding in explaining
        if finding.leaves**2 <= RESEMBLING * explaining[0].leaves ** 2 + _TINY
    ]
    names = [finding.mistake for finding in named]
    return SiteDiagnosis(
        site=case.site,
        unexplained=null,
        is_blamed=is_blamed,
        named=tuple(
            replace(finding, resembles=tuple(name for name in names if name != finding.mistake))
            for finding in named
        ),
        nearest=() if named else tuple(best[:_MOST_NEAREST]),
        num_hypotheses=len(findings),
        notes=case.notes,
    )


def _try_mistakes(case: SiteCase, mistakes: Sequence[ModelMistake], null: float) -> Iterator[MistakeFinding]:
    for mistake in filter(case.may_have, mistakes):
        for parameters in case.candidates(mistake):
            prediction = case.predict(mistake, parameters)
            if prediction is None:
                continue
            leaves = case.noise.rho(case.port, prediction)
            amplitude, z = _fit_amplitude(case, prediction, leaves)
            words = mistake.words.of(case.inputs.spec.family)
            # The share of the error that the mistake leaves.
            share = (leaves / null) ** 2 if math.isfinite(null) else float(not math.isfinite(leaves))
            yield MistakeFinding(
                layer=None,
                mistake=mistake.name,
                parameters=parameters,
                explains=max(1.0 - share, 0.0),
                leaves=leaves,
                amplitude=amplitude,
                z=z,
                what=words.what,
                look_at=words.look_at,
                sources=words.sources,
            )


def _fit_amplitude(case: SiteCase, prediction: torch.Tensor, leaves: float) -> tuple[float, float]:
    """Return the factor on the predicted error that fits the port's best, and its ratio to its uncertainty."""
    variance = case.noise.widened(prediction.nan_to_num(nan=0.0))  # of the noise, by channel: [F]
    predicted, error = (prediction - case.correct).double(), (case.port - case.correct).double()
    is_predicted = predicted.isfinite().all(dim=-1)
    predicted, error = predicted[is_predicted], error[is_predicted]
    energy = float((predicted.square() / variance).sum())
    if not 0.0 < energy < math.inf:
        return 0.0, 0.0
    amplitude = float((error * predicted / variance).sum()) / energy
    # Noise alone makes the amplitude uncertain by 1 / √energy, and what the mistake does not explain by `leaves` of it.
    return amplitude, amplitude * math.sqrt(energy) / max(leaves, 1.0)


def _best_of_each(findings: Iterable[MistakeFinding]) -> list[MistakeFinding]:
    """Return the best finding of each mistake: first those as good as the best, in the catalogue's order."""
    best: dict[str, MistakeFinding] = {}
    for finding in findings:
        # The first candidate of a mistake is its commonest: a later one must explain more.
        previous = best.get(finding.mistake)
        if previous is None or finding.leaves**2 * _SAME < previous.leaves**2:
            best[finding.mistake] = finding
    most = _SAME * min((finding.leaves for finding in best.values()), default=0.0) ** 2 + _TINY
    alike = [finding for finding in best.values() if finding.leaves**2 <= most]
    others = [finding for finding in best.values() if finding.leaves**2 > most]
    return [*alike, *sorted(others, key=lambda finding: finding.leaves)]
