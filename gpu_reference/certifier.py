"""Certifier: checks a finished golden before it is trusted, layer by layer, one layer's tensors in memory.

What can be checked of the capture alone is; what takes the model is checked where it is here, and named where not.
The proofs of `certify` refuse a model before it runs; these hold what it stored against mm2's own float32 layer.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gpu_reference.broken_versions import find_broken
from gpu_reference.golden_checks import (
    BF16_LIMIT,
    NORM_LIMIT,
    is_rotated_width,
    norm_spread,
    num_nonfinite,
    reference_limit,
    relative_distance,
    rotated_dims,
    router_faults,
)
from gpu_reference.own_layer import OwnLayer
from gpu_reference.variant_check import check_variants
from minimax_tools.capture.certificate import Certificate, Check, Outcome
from minimax_tools.capture.manifest import Entry, digest_tensor
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.fingerprint import ModelFingerprint
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.names import CORRECTION_BIAS
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CaptureError
from minimax_tools.inputs import Inputs
from minimax_tools.progress import Progress
from minimax_tools.provenance import library_versions
from minimax_tools.reference.modules import read_config
from minimax_tools.reference.twin import Float32Twin
from minimax_tools.sites import ModelSite, Site
from minimax_tools.spec import ModelSpec

logger = logging.getLogger(__name__)

_NO_MODEL = "no model was given: --model names it"
_NO_SITES = "the golden kept no sites for it"
_ROUTER_DTYPES = ("router_gate", "correction_bias")
_CHUNK_BYTES = 1 << 24
# Weights may be stored in BF16.
_WEIGHT_LIMIT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenModel:
    """The model that a golden was made of, to check it against.

    Args:
        reader: Its checkpoint.
        spec: Its quantities.
        runs_transformers: Whether transformers is here to make the float32 twins that a golden did not keep.
    """

    reader: CheckpointReader
    spec: ModelSpec
    runs_transformers: bool


@dataclass(slots=True, kw_only=True)
class _Tally:
    """A check of many things that each hold or do not: how many were looked at, and what does not hold."""

    name: str
    missing: str
    count: int = 0
    faults: list[str] = field(default_factory=list)

    def check(self, told: str) -> Check:
        """The check; `told` says what holds of those that were looked at."""
        if self.faults:
            return Check(name=self.name, outcome=Outcome.FAILED, found=_listed(self.faults))
        if not self.count:
            return Check(name=self.name, outcome=Outcome.NOT_CHECKED, found=self.missing)
        return Check(name=self.name, outcome=Outcome.PASSED, found=f"{told} ({self.count})")


@dataclass(slots=True, kw_only=True)
class _Worst:
    """The worst figure of a check so far, relative to its limit, and where it was."""

    name: str
    missing: str
    figure: float | None = None
    limit: float | None = None
    where: str = ""

    def take(self, figure: float, limit: float, where: str) -> None:
        """One more figure."""
        if self.figure is None or self.limit is None or not figure / limit <= self.figure / self.limit:
            self.figure, self.limit, self.where = figure, limit, where

    def check(self, told: str) -> Check:
        """The check; `told` says what the figure is."""
        if self.figure is None or self.limit is None:
            return Check(name=self.name, outcome=Outcome.NOT_CHECKED, found=self.missing)
        has_passed = self.figure <= self.limit
        return Check(
            name=self.name,
            outcome=Outcome.PASSED if has_passed else Outcome.FAILED,
            found=f"{told} by at most {self.figure:.2g}, at {self.where}; allowed {self.limit:.2g}",
            figure=_finite(self.figure),
            limit=self.limit,
        )


class Certifier:
    """Checks one golden.

    Args:
        capture: The golden.
        model: What it was made of; None where that is not here.
    """

    def __init__(self, capture: Capture, model: GoldenModel | None) -> None:
        self._capture = capture
        self._model = model
        self._dtype = torch.float32 if self._is_float32 else torch.bfloat16
        no_model = _NO_MODEL if model is None else _NO_SITES
        self._digests = _Tally(name="digests", missing="it holds no tensor")
        self._finite = _Tally(name="no_nan", missing="it holds no tensor")
        self._reference = _Worst(name="reference_layer", missing=no_model)
        self._noise = _Worst(name="bf16_noise", missing=_NO_SITES)
        self._norms = _Worst(name="qk_norm_width", missing=_NO_SITES)
        self._router = _Tally(name="router_choice", missing=no_model)
        self._rotary = _Tally(name="rotary_width", missing=no_model)

    def certify(self, progress: Progress) -> Certificate:
        """Check everything that can be checked here.

        Raises:
            CheckpointError: A layer of the model cannot be read.
        """
        capture = self._capture
        checks = [self._check_complete(), self._check_versions(), self._check_dtypes(), self._check_model()]
        is_same_model = all(check.outcome is not Outcome.FAILED for check in checks[-1:])
        inputs = self._read_inputs()
        for layer in capture.layers:
            self._check_layer(layer, inputs, is_same_model=is_same_model)
            progress.advance(layer, num_bytes=0)
        if inputs is not None:
            self._check_model_sites(inputs.attention_mask.bool())
        checks += [
            self._digests.check("tensors agree with their digests"),
            self._finite.check("tensors hold no NaN or Inf on a real row"),
            self._rotary.check("queries and keys rotate the width that config.json says"),
            self._norms.check("the norms scale the heads of a token differently"),
            self._router.check("layers choose experts by their logits and the float32 bias"),
            self._reference.check("transformers' float32 layer is off mm2's own"),
            self._noise.check("what the golden stored is off its float32 layer"),
        ]
        checks += check_variants(capture)
        return Certificate(
            checks=tuple(checks),
            content=capture.manifest.content_digest(),
            files={path.name: _digest_file(path) for path in sorted(capture.directory.glob("*.safetensors"))},
            versions=library_versions(),
        )

    @property
    def _is_float32(self) -> bool:
        return self._capture.description.provenance.dtypes.get("weights") == "float32"

    def _check_complete(self) -> Check:
        manifest = self._capture.manifest
        wanted = self._capture.description.run.span
        found = f"{len(manifest.complete_layers)} of {len(wanted)} layers are stored"
        return _verdict("complete", is_right=manifest.is_complete, found=found)

    def _check_versions(self) -> Check:
        versions = self._capture.description.provenance.versions
        broken = find_broken(versions)
        known = ", ".join(
            f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions
        )
        return _verdict(
            "versions", is_right=not broken, found="; ".join(broken) or f"{known}: none known to be broken"
        )

    def _check_dtypes(self) -> Check:
        dtypes = self._capture.description.provenance.dtypes
        found = ", ".join(f"{name} {dtypes.get(name, 'unknown')}" for name in _ROUTER_DTYPES)
        is_right = all(dtypes.get(name) == "float32" for name in _ROUTER_DTYPES)
        return _verdict("float32_router", is_right=is_right, found=found)

    def _check_model(self) -> Check:
        """Whether the model that is here is the one that the golden was made of."""
        if self._model is None:
            return Check(name="same_model", outcome=Outcome.NOT_CHECKED, found=_NO_MODEL)
        made = self._capture.description.provenance.model
        here = ModelFingerprint.of(self._model.reader, self._model.spec, self._capture.description.run.span)
        if here.spec_digest != made.spec_digest:
            return _verdict("same_model", is_right=False, found="config.json describes another model")
        other = [layer for layer, digest in here.layers.items() if made.layers.get(layer) != digest]
        found = f"norms or router of layers {other[:4]} differ" if other else "config, norms and router agree"
        return _verdict("same_model", is_right=not other, found=found)

    def _read_inputs(self) -> Inputs | None:
        try:
            inputs = self._capture.read_inputs()
        except CaptureError as error:
            self._digests.faults.append(str(error))
            return None
        is_right = inputs.digest() == self._capture.description.inputs_digest
        self._digests.count += 1
        if not is_right:
            self._digests.faults.append("the inputs differ from their digest")
        return inputs

    def _check_layer(self, layer: int, inputs: Inputs | None, *, is_same_model: bool) -> None:
        stored = {
            site: tensor
            for site in self._capture.sites(layer)
            if (entry := self._capture.entry(layer, site)) is not None
            and (tensor := self._read(entry)) is not None
        }
        if inputs is None:
            return
        real = inputs.attention_mask.bool()
        for site, tensor in stored.items():
            self._take_finite(site, tensor, real, f"{site} of layer {layer}")
        self._check_norms(layer, stored, real)
        twins = self._read_twins(layer, stored, real)
        self._check_rope(layer, stored, {} if self._is_float32 else twins, real)
        model = self._model
        own = None
        if model is not None and is_same_model and Site.INPUT in stored:
            tensors = LayerTensors.open(model.reader, model.spec, layer, self._dtype)
            chosen = stored.get(Site.ROUTER_EXPERTS)
            own = OwnLayer(model.spec, tensors).run(stored[Site.INPUT], inputs, router_experts=chosen)
            exact = twins or self._run_twins(layer, stored, inputs, tensors)
            largest = int(inputs.position_ids[real].max())
            for site, tensor in exact.items():
                if site in own and tensor.is_floating_point():
                    distance = relative_distance(site, tensor, own[site], real)
                    self._reference.take(distance, reference_limit(site, largest), f"{site} of layer {layer}")
            if {Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS} <= stored.keys():
                self._take_router(layer, stored, tensors[CORRECTION_BIAS], real)
        if not self._is_float32:
            for site, tensor in stored.items():
                exact_here = (own or twins).get(site)
                if exact_here is not None and tensor.is_floating_point():
                    distance = relative_distance(site, tensor, exact_here, real)
                    self._noise.take(distance, BF16_LIMIT, f"{site} of layer {layer}")

    def _read(self, entry: Entry) -> torch.Tensor | None:
        """A stored tensor, its digest compared; None where it cannot be read."""
        try:
            tensor = self._capture.read_entry(entry)
        except CaptureError as error:
            self._digests.faults.append(str(error))
            return None
        self._digests.count += 1
        if digest_tensor(tensor) != entry.sha256:
            place = entry.site if entry.layer is None else f"{entry.site} of layer {entry.layer}"
            self._digests.faults.append(f"{place} differs from its digest")
        return tensor

    def _read_twins(
        self, layer: int, stored: Mapping[Site, torch.Tensor], real: torch.Tensor
    ) -> dict[Site, torch.Tensor]:
        """The float32 twins that the golden kept; of a float32 golden what it stored is as exact."""
        if self._is_float32:
            return {site: tensor for site, tensor in stored.items() if site is not Site.INPUT}
        twins = {}
        for site in Site:
            try:
                twin = self._capture.read_twin(layer, site)
            except CaptureError as error:
                self._digests.faults.append(str(error))
                break
            if twin is not None:
                twins[site] = twin
                self._take_finite(site, twin, real, f"the float32 twin of {site} of layer {layer}")
        return twins

    def _run_twins(
        self, layer: int, stored: Mapping[Site, torch.Tensor], inputs: Inputs, tensors: LayerTensors
    ) -> dict[Site, torch.Tensor]:
        """transformers' layer run once more in float32, where the golden kept no twins of it."""
        model = self._model
        assert model is not None, "there are weights"
        if not model.runs_transformers:
            self._reference.missing = (
                "the golden kept no float32 twins, and transformers is not installed here"
            )
            return {}
        config = read_config(model.reader.folder, num_hidden_layers=model.spec.num_hidden_layers)
        twin = Float32Twin(config, tensors, layer=layer, device=torch.device("cpu"))
        sites = tuple(site for site in Site if site is not Site.INPUT)
        chosen = stored.get(Site.ROUTER_EXPERTS)
        return twin.run(stored[Site.INPUT], inputs, router_experts=chosen, sites=sites)

    def _check_rope(
        self,
        layer: int,
        stored: Mapping[Site, torch.Tensor],
        twins: Mapping[Site, torch.Tensor],
        real: torch.Tensor,
    ) -> None:
        if self._model is None:
            return
        width = self._model.spec.rotary_dim
        for normed, rotated in ((Site.Q_NORM, Site.Q_ROPE), (Site.K_NORM, Site.K_ROPE)):
            for kind, tensors in (("", stored), ("the float32 twin of ", twins)):
                if not {normed, rotated} <= tensors.keys():
                    continue
                changes = rotated_dims(tensors[normed], tensors[rotated], real)
                self._rotary.count += 1
                if not is_rotated_width(changes, width):
                    changed = int(changes.nonzero().max()) + 1 if bool(changes.any()) else 0
                    self._rotary.faults.append(
                        f"{kind}{rotated} of layer {layer} rotates {changed} dims of a head, config.json says {width}"
                    )

    def _check_norms(self, layer: int, stored: Mapping[Site, torch.Tensor], real: torch.Tensor) -> None:
        if Site.Q_ROPE not in stored:
            return
        head_dim = stored[Site.Q_ROPE].shape[-1]
        for projected, normed in ((Site.Q_PROJ, Site.Q_NORM), (Site.K_PROJ, Site.K_NORM)):
            if {projected, normed} <= stored.keys():
                spread = norm_spread(stored[projected], stored[normed], real, head_dim=head_dim)
                self._norms.take(spread, NORM_LIMIT[self._dtype], f"{normed} of layer {layer}")

    def _take_router(
        self, layer: int, stored: Mapping[Site, torch.Tensor], bias: torch.Tensor, real: torch.Tensor
    ) -> None:
        assert self._model is not None, "the bias is the model's"
        num_wrong, error = router_faults(stored, bias, real, self._model.spec)
        self._router.count += 1
        if num_wrong:
            self._router.faults.append(
                f"layer {layer}: the experts of {num_wrong} of {int(real.sum())} tokens do not follow from "
                "their logits and the checkpoint's float32 bias"
            )
        if error > _WEIGHT_LIMIT:
            self._router.faults.append(
                f"layer {layer}: router_weights are off by {error:.2g} of what the unbiased scores give"
            )

    def _take_finite(self, site: Site, tensor: torch.Tensor, real: torch.Tensor, where: str) -> None:
        count = num_nonfinite(site, tensor, real)
        self._finite.count += 1
        if count:
            self._finite.faults.append(f"{count} of {where}")

    def _check_model_sites(self, real: torch.Tensor) -> None:
        for entry in self._capture.manifest.entries:
            if entry.layer is not None:
                continue
            tensor = self._read(entry)
            if tensor is not None and entry.site in {str(site) for site in ModelSite}:
                count = int((~torch.isfinite(tensor[real])).sum())
                if count:
                    self._finite.faults.append(f"{count} of {entry.site}")


def _verdict(name: str, *, is_right: bool, found: str) -> Check:
    return Check(name=name, outcome=Outcome.PASSED if is_right else Outcome.FAILED, found=found)


def _finite(figure: float | None) -> float | None:
    """JSON has no infinity."""
    return figure if figure is not None and abs(figure) < float("inf") else None


def _digest_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_CHUNK_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _listed(faults: list[str]) -> str:
    return "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if faults[3:] else "")
