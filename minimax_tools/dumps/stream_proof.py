"""Stream proof: finds the residual stream in a dump by what its tensors must satisfy, whatever their names.

What a layer's module returns is the layer's output if it passes one of two tests:

| test | passes if the tensor is |
|---|---|
| sum | the stream before the layer plus attention's and experts' deltas, but for rounding |
| norm | what the norm behind the layer returns, but for a scale of each token and of each channel |

If it passes neither, the sum itself is taken, if it passes the test of the norm. That proves nothing if the tokens are
all alike, as in a warm-up. Right and wrong ports pass alike: the tests tell what a tensor is, not whether it is right.
T real tokens of one pass, H hidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from minimax_tools.dumps.assembly import DumpAssembly
from minimax_tools.dumps.found_sites import FoundSite, FoundSites
from minimax_tools.dumps.piece import word_module
from minimax_tools.dumps.placed_capture import SiteKey
from minimax_tools.errors import CaptureError
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import word_layers

# With fewer tokens a norm's scales fit any tensor; more cost time and prove nothing else.
_LEAST_TOKENS, _MOST_TOKENS = 8, 256
# Share of the values that are still equal if each token is taken for its neighbour: with more, the tokens are so alike
# that a norm's scales fit any tensor.
_MOST_ALIKE = 0.5
# BF16 rounds a value by up to 2⁻⁸ of it. A norm rounds twice.
_ROUNDING = 2.0**-7
# Share of the values that must be equal but for rounding.
_LEAST_SHARE = 0.99
_DELTAS = (Site.ATTN_DELTA, Site.MOE_DELTA)
_STREAM = (Site.ATTN_RESIDUAL, Site.OUTPUT)
# The stream behind attention, and behind the experts, in words.
_TO_ATTENTION = "the stream before the layer + attention"
_TO_EXPERTS = f"{_TO_ATTENTION} + experts"
_NORM_TELLS = "the norm behind returns it, scaled by token and by channel"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stream:
    """The residual stream at one point."""

    site: FoundSite  # where it lies in the dump
    values: torch.Tensor  # [T,H], in the dump's dtype

    def plus(self, other: _Stream) -> _Stream | None:
        """Return the stream behind an addition; None if the other has another shape."""
        if self.values.shape != other.values.shape:
            return None
        total = self.values.to(torch.float32) + other.values.to(torch.float32)
        return _Stream(
            site=FoundSite(terms=self.site.terms + other.site.terms, is_running_sum=True),
            values=total.to(self.values.dtype),
        )


def prove_stream(found: FoundSites) -> FoundSites:
    """Return the sites with the outputs, and the stream behind attention, that the dump's values prove.

    One pass is read, of others the embedding alone, and nothing if these sites of all layers were found by name. What
    cannot be read proves nothing: a damaged file is an error when its site is read.
    """
    layers = sorted({layer for layer, site in found.sites if layer is not None and site in _DELTAS})
    if all((layer, site) in found.sites for layer in layers for site in _STREAM):
        return found
    prover = _choose_prover(found)
    if prover is None:
        return found
    for layer in layers:
        prover.follow(layer)
    used = {term.module for site in prover.proved.values() for term in site.terms}
    return replace(
        found,
        sites={**found.sites, **prover.proved},
        unmapped=tuple(module for module in found.unmapped if module not in used),
        notes=(*_word_proofs(prover.reasons), *_word_unproved(prover.unproved, found)),
    )


class _Prover:
    """A walk through one pass of a dump, layer by layer."""

    def __init__(self, found: FoundSites, *, step: str) -> None:
        self._found = found
        self._step = step
        self._assembly = DumpAssembly(found=found)
        self._rows = _real_rows(found, step)
        self._stream = self._read((None, ModelSite.EMBEDDING))
        self._next_layer = 0
        self.proved: dict[SiteKey, FoundSite] = {}  # sites that were proved
        # Layers by what was proved of them, in words; names have `{layer}` in place of the layer's number.
        self.reasons: dict[str, list[int]] = defaultdict(list)
        self.unproved: list[int] = []  # layers whose output nothing proved

    @property
    def has_enough_tokens(self) -> bool:
        """True if the pass has enough different tokens to prove by, as far as their embeddings tell."""
        if self._stream is None:
            return (None, ModelSite.EMBEDDING) not in self._found.sites
        return len(self._stream.values.to(torch.float32).unique(dim=0)) >= _LEAST_TOKENS

    def follow(self, layer: int) -> None:
        """Prove what can be proved of one layer; layers come in ascending order."""
        if layer != self._next_layer:
            self._stream = self._read((layer - 1, Site.OUTPUT))
        attention, experts = (self._read((layer, site)) for site in _DELTAS)
        before, behind = self._stream, None
        if before is not None and attention is not None:
            behind = before.plus(attention)
        if behind is not None:
            self._prove_residual(layer, behind)
        total = None if behind is None or experts is None else behind.plus(experts)
        self._stream = self._read((layer, Site.OUTPUT)) or self._prove_output(layer, total)
        self._next_layer = layer + 1

    def _prove_residual(self, layer: int, behind: _Stream) -> None:
        key = (layer, Site.ATTN_RESIDUAL)
        normed = self._read((layer, Site.POST_NORM))
        if key not in self._found.sites and normed is not None and _is_normed(behind, normed):
            self.proved[key] = behind.site
            self.reasons[f"attn_residual is {_TO_ATTENTION}: {_NORM_TELLS}"].append(layer)

    def _prove_output(self, layer: int, total: _Stream | None) -> _Stream | None:
        """Return the stream behind a layer whose output no name tells; None if nothing proves it."""
        held = self._read_site(self._found.layer_returns.get(layer))
        normed = self._read((layer + 1, Site.INPUT_NORM)) or self._read_last_norm(layer)
        reason = ""
        if held is not None and total is not None and _are_equal(held, total):
            how = "bit for bit" if torch.equal(held.values, total.values) else "but for rounding"
            reason = f"{_name(held)} is the layer's output: {_TO_EXPERTS}, {how}"
        elif held is not None and normed is not None and _is_normed(held, normed):
            reason = f"{_name(held)} is the layer's output: {_NORM_TELLS}"
        elif total is not None and normed is not None and _is_normed(total, normed):
            reason = f"output is {_TO_EXPERTS}: {_NORM_TELLS}"
            held = total
        if not reason or held is None:
            self.unproved.append(layer)
            return None
        self.proved[layer, Site.OUTPUT] = held.site
        self.reasons[reason].append(layer)
        return held

    def _read_last_norm(self, layer: int) -> _Stream | None:
        """Read the final norm's output behind the last layer."""
        layers = [number for number, _ in self._found.sites if number is not None]
        return self._read((None, ModelSite.FINAL_NORM)) if layer == max(layers) else None

    def _read(self, key: SiteKey) -> _Stream | None:
        return self._read_site(self._found.sites.get(key))

    def _read_site(self, site: FoundSite | None) -> _Stream | None:
        """Read a tensor's real tokens; None if the pass lacks it, or it has other rows or dims."""
        if site is None or site.transpose or any(self._step not in term.steps for term in site.terms):
            return None
        try:
            values = self._assembly.read_pass(site, self._step, what="a tensor of the residual stream")
        except CaptureError:
            return None
        values = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values[None]
        if self._rows is not None:
            if len(values) <= int(self._rows.max()):
                return None
            values = values[self._rows]
        return _Stream(site=site, values=values[:_MOST_TOKENS].clone())


def _are_equal(held: _Stream, total: _Stream) -> bool:
    """Decide whether two tensors are equal but for rounding to BF16."""
    if held.values.shape != total.values.shape:
        return False
    first, second = held.values.to(torch.float32), total.values.to(torch.float32)
    is_equal = (first - second).abs() <= _ROUNDING * torch.maximum(first.abs(), second.abs())
    return _share(is_equal, first, second) >= _LEAST_SHARE


def _is_normed(stream: _Stream, normed: _Stream) -> bool:
    """Decide whether `normed` is the RMS norm of the stream, whatever the norm's weight [H]."""
    values, result = stream.values.to(torch.float64), normed.values.to(torch.float64)
    if values.shape != result.shape:
        return False
    is_finite = (values.isfinite() & result.isfinite()).all(dim=-1)
    is_real = is_finite & (values != 0).any(dim=-1)  # a token of zeros fits any scale
    values, result = values[is_real], result[is_real]
    if len(values) < _LEAST_TOKENS:
        return False
    unscaled = values * values.square().mean(dim=-1, keepdim=True).clamp(min=1e-30).rsqrt()
    is_alike = _scaled_share(unscaled.roll(1, dims=0), result) > _MOST_ALIKE
    return not is_alike and _scaled_share(unscaled, result) >= _LEAST_SHARE


def _scaled_share(unscaled: torch.Tensor, result: torch.Tensor) -> float:
    """Return the share of equal values of two tensors [T,H], the first scaled by the weight [H] that fits best."""
    weight = (unscaled * result).sum(dim=0) / unscaled.square().sum(dim=0).clamp(min=1e-30)
    fitted = unscaled * weight
    is_equal = (result - fitted).abs() <= _ROUNDING * fitted.abs()
    return _share(is_equal, result, fitted)


def _share(is_equal: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the share of equal values among the finite ones that are not both zero (padding); 0 without any."""
    counts = first.isfinite() & second.isfinite() & ((first != 0) | (second != 0))
    return float(is_equal[counts].double().mean()) if bool(counts.any()) else 0.0


def _choose_prover(found: FoundSites) -> _Prover | None:
    """Return a prover in the smallest pass with enough tokens, else in the largest; None without passes."""
    num_tokens = _count_tokens(found)
    enough = [step for step in num_tokens if num_tokens[step] >= _LEAST_TOKENS]
    provers = (_Prover(found, step=step) for step in sorted(enough, key=num_tokens.__getitem__))
    chosen = next((prover for prover in provers if prover.has_enough_tokens), None)
    if chosen is None and num_tokens:
        return _Prover(found, step=max(num_tokens, key=num_tokens.__getitem__))
    return chosen


def _count_tokens(found: FoundSites) -> dict[str, int]:
    """Count the real tokens of each pass; if the dump does not tell them, take the first pass to have enough."""
    if found.schedule is None:
        return dict.fromkeys([step for group in found.passes for step in group][:1], _LEAST_TOKENS)
    rows = found.schedule.rows(found.schedule.requests)
    return {step: sum(stretch.length for _, stretch in rows.in_pass(step)) for step in rows.steps}


def _real_rows(found: FoundSites, step: str) -> torch.Tensor | None:
    """Return the rows of a pass that are real tokens, int64 [T]; None if the dump does not tell."""
    if found.schedule is None:
        return None
    in_pass = found.schedule.rows(found.schedule.requests).in_pass(step)
    return torch.cat([torch.arange(stretch.row, stretch.row + stretch.length) for _, stretch in in_pass])


def _name(stream: _Stream) -> str:
    return word_module(stream.site.terms[0].module)


def _word_proofs(reasons: Mapping[str, Sequence[int]]) -> Iterator[str]:
    for reason, layers in reasons.items():
        yield f"proved in {word_layers(layers)}: {reason}"


def _word_unproved(layers: Sequence[int], found: FoundSites) -> Iterator[str]:
    """Yield what would tell the outputs that nothing proved: a line for a map, or a module to capture."""
    held = [layer for layer in layers if layer in found.layer_returns]
    if held:
        name = word_module(found.layer_returns[held[0]].terms[0].module)
        yield (
            f"{name} of {word_layers(held)} is neither {_TO_EXPERTS} nor what the next norm reads, and is not taken "
            f'for the output. If it is, say so in a map: sites: {{output: "{name}"}}'
        )
    missing = [layer for layer in layers if layer not in found.layer_returns]
    if missing:
        yield f"nothing tells the output of {word_layers(missing)}: capture model.layers.N too, or the norm behind"
