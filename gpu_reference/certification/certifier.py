"""The certificate of a finished golden, checked layer by layer with one layer's tensors in memory.

Some checks need the capture alone, others the model too: its layers in float32 by mm2's own stages. The certificate
names the checks that could not run. A wrong variant of the noise floor would widen it too far, and hide faults:
variants are checked against the float32 twins.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from gpu_reference.certification.golden_checks import (
    NORM_LIMIT,
    SCALE_LIMIT,
    Tally,
    Worst,
    bf16_limit,
    claim,
    count_nonfinite,
    find_router_faults,
    is_rotated_width,
    norm_spread,
    reference_limit,
    relative_distance,
    rotated_dims,
    scale_error,
)
from gpu_reference.certification.trust import refuse_run
from minimax_tools.capture.manifest import Certificate, Check, Outcome
from minimax_tools.capture.mirror import CaptureMirror
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import inspect_capture
from minimax_tools.capture.writer import store_certificate
from minimax_tools.checkpoint.fingerprint import fingerprint_model
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CaptureError
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.machine.progress import LayerProgress, Progress
from minimax_tools.metrics.noise_floor import error_name, error_norms, token_rows, variant_name
from minimax_tools.model.graph import QkNorm
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.router import Router, router_dtypes
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.provenance import library_versions
from minimax_tools.reference.evaluation import Float32Layer
from minimax_tools.reference.modules import read_config
from minimax_tools.reference.twin import Float32Twin

_NAME = "floor_variants"


@dataclass(frozen=True, slots=True, kw_only=True)
class _VariantError:
    """The distance of a variant from the float32 twin, at a site of a layer."""

    where: str  # site, layer and variant, in words
    distance: float  # distance relative to the golden's values; absolute if these are all 0
    limit: float  # largest distance that BF16 explains
    widening: float  # distance in units of the golden's own error; 1 if both compute the same


def check_variants(capture: Capture) -> tuple[Check, ...]:
    """Check that no variant is further from the float32 twin than BF16 explains; () for a golden without variants."""
    if not capture.description.floor_variants:
        return ()
    try:
        errors = [error for layer in capture.layers for error in _measure_layer(capture, layer)]
    except CaptureError as damage:
        return (Check(name=_NAME, outcome=Outcome.FAILED, found=str(damage)),)
    worst = Worst(name=_NAME, missing="the golden stored no site that a variant changes")
    for error in errors:
        worst.add(error.distance, error.limit, error.where)
    check = worst.check("variants are off the float32 layer")
    if not errors:
        return (check,)
    widest = max(errors, key=lambda error: error.widening)
    found = f"{check.found}; they widen the floor up to {widest.widening:.3g} times, at {widest.where}"
    if check.outcome is Outcome.FAILED:
        found += "; make the golden with --floor-variants 0"
    return (replace(check, found=found),)


def _measure_layer(capture: Capture, layer: int) -> Iterator[_VariantError]:
    real = capture.read_kept_mask()
    for site in capture.sites(layer):
        golden_floor = capture.read_floor(layer, error_name(site))
        if golden_floor is None:
            # The site has no floor, as the chosen experts.
            continue
        golden_norm = float(token_rows(capture.read(layer, site), site)[real].float().norm())
        for variant in capture.description.floor_variants:
            error = _read_error(capture, layer, variant, site)
            variant_error, golden_error = float(error[real].norm()), float(golden_floor[real].norm())
            yield _VariantError(
                where=f"{site} of layer {layer} ({variant})",
                distance=variant_error / golden_norm if golden_norm else variant_error,
                limit=bf16_limit(site),
                widening=variant_error / golden_error if golden_error else 1.0,
            )


def _read_error(capture: Capture, layer: int, variant: str, site: Site) -> torch.Tensor:
    name = variant_name(variant, error_name(site))
    error = capture.read_floor(layer, name)
    if error is None:
        raise CaptureError(f"the floor of layer {layer} holds no {name}", next_step="Run the capture again.")
    return error


NO_MODEL = "no model was given: --model names it"
_OTHER_MODEL = "the model that was given is not the golden's"
_NO_SITES = "the golden kept no sites for it"
_DAMAGED = "the golden is damaged"
# Absolute error allowed to a router weight, which may be stored in BF16.
_WEIGHT_LIMIT = 0.01
# Relative difference allowed between a stored and a recomputed error norm. Float32 sums in another order differ by far
# less.
_FLOOR_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenModel:
    """The model that a golden is checked against."""

    reader: CheckpointReader
    spec: ModelSpec
    runs_transformers: (
        bool  # whether transformers is here, to make float32 twins that the golden did not store
    )


class LayerCertifier:
    """The checks of a golden's layers, one layer at a time.

    Args:
        golden: The golden. No layer is checked of a damaged one.
        model: Model to check the golden against; None if none was given.
        model_differs: Whether the golden was made of another model than `model`. Weights are not compared then.
    """

    def __init__(self, golden: Capture, model: GoldenModel | None, *, model_differs: bool) -> None:
        self._golden = golden
        self._model = model
        self._model_differs = model_differs
        # Its tensors are then their own float32 twins.
        self._is_float32 = golden.description.provenance.dtypes.get("weights") == "float32"
        self._dtype = torch.float32 if self._is_float32 else torch.bfloat16
        self._floor = Tally(name="noise_floor", missing="the golden kept no float32 twins")
        self._finite = Tally(name="no_nan", missing="it holds no tensor")
        no_model = NO_MODEL if model is None else _NO_SITES
        no_weights = _OTHER_MODEL if model_differs else no_model
        self._reference = Worst(name="reference_layer", missing=no_weights)
        self._noise = Worst(name="bf16_noise", missing=_NO_SITES)
        self._scale = Worst(name="bf16_scale", missing=_NO_SITES)
        self._norms = Worst(name="qk_norm_width", missing=_NO_SITES)
        self._router = Tally(name="router_choice", missing=no_weights)
        self._rotary = Tally(name="rotary_width", missing=no_weights)

    def check_layer(self, layer: int) -> None:
        """Check a layer."""
        stored = {site: self._golden.read(layer, site) for site in self._golden.sites(layer)}
        self._check_finite(stored, f"of layer {layer}")
        self._check_norms(layer, stored)
        twins = self._read_twins(layer, stored)
        if not self._is_float32:
            self._check_floor(layer, stored, twins)
        # A float32 golden's twins are its stored sites, which are checked already.
        self._check_rope(layer, stored, {} if self._is_float32 else twins)
        computed = self._check_weights(layer, stored, twins)
        if not self._is_float32:
            # Without the golden's model, the stored twins stand in for mm2's own float32 layer.
            self._check_noise(layer, stored, computed or twins)

    def checks(self) -> list[Check]:
        """Return the checks of all layers so far."""
        return [
            self._floor.check("stored distances are those from the golden to its float32 twins"),
            self._finite.check("tensors hold no NaN or Inf on a real token"),
            self._rotary.check("queries and keys rotate the width that config.json says"),
            self._norms.check("the norms scale the heads of a token differently"),
            self._router.check("layers choose experts by their logits and the checkpoint's router"),
            self._reference.check("transformers' float32 layer is off mm2's own"),
            self._noise.check("what the golden stored is off its float32 layer"),
            self._scale.check("what the golden stored is larger or smaller than its float32 layer"),
        ]

    def check_model_sites(self) -> None:
        """Check that the sites outside the layers hold no NaN or Inf."""
        for site in self._golden.model_sites():
            count = int((~torch.isfinite(self._golden.read(None, site)[self._real])).sum())
            if count:
                # Not `add`: the number of tensors in the certificate is that of the layers' tensors.
                self._finite.faults.append(f"{count} of {site}")

    @cached_property
    def _inputs(self) -> Inputs:
        return self._golden.read_inputs()

    @property
    def _real(self) -> torch.Tensor:
        """True where a token's values are kept, bool [B,S]."""
        return self._inputs.is_kept

    def _read_twins(self, layer: int, stored: Mapping[Site, torch.Tensor]) -> dict[Site, torch.Tensor]:
        """Read the float32 twins of a layer, and count their NaN and Inf. A float32 golden's are the `stored` sites."""
        if self._is_float32:
            return {site: tensor for site, tensor in stored.items() if site is not Site.INPUT}
        read = {site: self._golden.read_twin(layer, site) for site in Site}
        twins = {site: twin for site, twin in read.items() if twin is not None}
        self._check_finite(twins, f"of layer {layer}", kind="the float32 twin of ")
        return twins

    def _check_finite(self, tensors: Mapping[Site, torch.Tensor], where: str, *, kind: str = "") -> None:
        for site, tensor in tensors.items():
            count = count_nonfinite(site, tensor, self._real)
            faults = [f"{count} of {kind}{site} {where}"] if count else []
            self._finite.add(*faults)

    def _check_floor(
        self, layer: int, stored: Mapping[Site, torch.Tensor], twins: Mapping[Site, torch.Tensor]
    ) -> None:
        """Check that the stored noise floor is the distance of the stored sites from their twins."""
        for site, twin in twins.items():
            name = error_name(site)
            stored_norms = self._golden.read_floor(layer, name)
            if site not in stored or stored_norms is None:
                continue
            norms = error_norms(site, stored[site], twin, real=self._real)[name]
            is_same = torch.allclose(norms, stored_norms, rtol=_FLOOR_TOLERANCE, atol=0.0)
            faults = [] if is_same else [f"{name} of layer {layer}"]
            self._floor.add(*faults)

    def _check_weights(
        self, layer: int, stored: Mapping[Site, torch.Tensor], twins: Mapping[Site, torch.Tensor]
    ) -> dict[Site, torch.Tensor]:
        """Check twins and router against mm2's own float32 layer; return its sites, {} without the golden's model."""
        model, inputs = self._model, self._inputs
        if model is None or self._model_differs or Site.INPUT not in stored:
            return {}
        tensors = LayerTensors.open(model.reader, model.spec, layer, self._dtype)
        chosen = stored.get(Site.ROUTER_EXPERTS)
        computed = Float32Layer(model.spec, tensors).run(stored[Site.INPUT], inputs, router_experts=chosen)
        exact = twins or self._run_twins(layer, stored, tensors)
        largest_position = int(inputs.position_ids[self._real].max())
        for site, tensor in exact.items():
            if site in computed and tensor.is_floating_point():
                distance = relative_distance(site, tensor, computed[site], self._real)
                self._reference.add(
                    distance, reference_limit(site, largest_position), f"{site} of layer {layer}"
                )
        if {Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS} <= stored.keys():
            self._check_router(layer, stored, Router.of(model.spec, tensors))
        return computed

    def _run_twins(
        self, layer: int, stored: Mapping[Site, torch.Tensor], tensors: LayerTensors
    ) -> dict[Site, torch.Tensor]:
        """Run transformers' layer in float32, for a golden that stored no twins; {} without transformers."""
        model = self._model
        assert model is not None, "the layer's weights came from the model"
        if not model.runs_transformers:
            self._reference.missing = (
                "the golden kept no float32 twins, and transformers is not installed here"
            )
            return {}
        config = read_config(model.reader.folder, num_hidden_layers=model.spec.num_hidden_layers)
        twin = Float32Twin(config, tensors, spec=model.spec, layer=layer, device=torch.device("cpu"))
        sites = tuple(site for site in Site if site is not Site.INPUT)
        chosen = stored.get(Site.ROUTER_EXPERTS)
        return twin.run(stored[Site.INPUT], self._inputs, router_experts=chosen, sites=sites)

    def _check_noise(
        self, layer: int, stored: Mapping[Site, torch.Tensor], exact: Mapping[Site, torch.Tensor]
    ) -> None:
        for site, tensor in stored.items():
            if site in exact and tensor.is_floating_point():
                distance = relative_distance(site, tensor, exact[site], self._real)
                self._noise.add(distance, bf16_limit(site), f"{site} of layer {layer}")
                scale = scale_error(site, tensor, exact[site], self._real)
                self._scale.add(scale, SCALE_LIMIT, f"{site} of layer {layer}")

    def _check_rope(
        self, layer: int, stored: Mapping[Site, torch.Tensor], twins: Mapping[Site, torch.Tensor]
    ) -> None:
        if self._model is None or self._model_differs:
            return
        width = self._model.spec.rotary_dim
        for rotated in (Site.Q_ROPE, Site.K_ROPE):
            given = self._golden.graph.unrotated(rotated)
            for prefix, tensors in (("", stored), ("the float32 twin of ", twins)):
                if not {given, rotated} <= tensors.keys():
                    # The golden did not keep both.
                    continue
                changes = rotated_dims(tensors[given], tensors[rotated], self._real)
                if is_rotated_width(changes, width):
                    self._rotary.add()
                    continue
                num_rotated = int(changes.nonzero().max()) + 1 if bool(changes.any()) else 0
                where = f"{prefix}{rotated} of layer {layer}"
                self._rotary.add(f"{where} rotates {num_rotated} dims of a head, config.json says {width}")

    def _check_norms(self, layer: int, stored: Mapping[Site, torch.Tensor]) -> None:
        if Site.Q_ROPE not in stored:
            return
        qk_norm = self._golden.graph.qk_norm
        if qk_norm is not QkNorm.ALL_HEADS:
            is_per_head = qk_norm is QkNorm.PER_HEAD
            self._norms.missing = f"this model norms {'each head for itself' if is_per_head else 'no head'}"
            return
        head_dim = stored[Site.Q_ROPE].shape[-1]
        for projected, normed in ((Site.Q_PROJ, Site.Q_NORM), (Site.K_PROJ, Site.K_NORM)):
            if {projected, normed} <= stored.keys():
                spread = norm_spread(stored[projected], stored[normed], self._real, head_dim=head_dim)
                self._norms.add(spread, NORM_LIMIT[self._dtype], f"{normed} of layer {layer}")

    def _check_router(self, layer: int, stored: Mapping[Site, torch.Tensor], router: Router) -> None:
        num_wrong_tokens, weight_error = find_router_faults(stored, router, self._real)
        faults = []
        if num_wrong_tokens:
            faults.append(
                f"layer {layer}: the experts of {num_wrong_tokens} of {int(self._real.sum())} tokens do not follow "
                "from their logits and the checkpoint's router"
            )
        if weight_error > _WEIGHT_LIMIT:
            faults.append(
                f"layer {layer}: router_weights differ by up to {weight_error:.2g} from those of the unbiased scores"
            )
        self._router.add(*faults)


# The first good version of each package that made wrong goldens before, and what was wrong.
_FIRST_GOOD = {
    "transformers": ("5.23", "it ignores rotary_dim and rotates whole heads (transformers#48241)"),
}


def certify_golden(directory: Path, model: str | None) -> Certificate:
    """Check a golden, and store the result in its manifest; raise as `check_golden` does.

    Raises:
        CaptureError: Its manifest cannot be written.
    """
    certificate = check_golden(Capture.open(directory), model)
    store_certificate(directory, certificate)
    return certificate


def check_golden(capture: Capture, model: str | None) -> Certificate:
    """Check a golden, and return the result. All files of a golden at a remote address are fetched.

    `model` is the checkpoint that the golden was made of, a folder or a hub id; with None, the checks that need it are
    listed as not made.

    Raises:
        CaptureError: There is no golden.
    """
    refuse_run(capture, next_step="Judge it against a golden: mm2-compare.")
    mirror = CaptureMirror.find(capture.directory, capture.manifest)
    if mirror is not None:
        mirror.hold_all()
    with ExitStack() as stack:
        golden_model = None if model is None else _open_model(capture, model, stack)
        progress = stack.enter_context(LayerProgress(len(capture.layers), label="Certify"))
        checks = _run_checks(capture, golden_model, progress)
    return Certificate(
        checks=tuple(checks),
        content=capture.manifest.content_digest(),
        versions=library_versions(),
    )


def _open_model(capture: Capture, model: str, stack: ExitStack) -> GoldenModel:
    spec = ModelSpec.from_folder(resolve_config(model))
    span = capture.description.run.span
    # Another model may have fewer layers than the golden: it is opened all the same, and `_check_model` names it.
    layers = range(span.start, min(span.stop, spec.num_hidden_layers))
    reader = stack.enter_context(CheckpointReader(resolve_model(model, layers=layers), layers=layers))
    runs_transformers = importlib.util.find_spec("transformers") is not None
    return GoldenModel(reader=reader, spec=spec, runs_transformers=runs_transformers)


def _run_checks(capture: Capture, model: GoldenModel | None, progress: Progress) -> list[Check]:
    same_model = _check_model(capture, model)
    manifest_checks = [_check_complete(capture), _check_versions(capture), _check_dtypes(capture), same_model]
    inspection = inspect_capture(capture)
    digests = Tally(name="digests", missing="it holds no tensor", count=inspection.num_tensors)
    digests.faults += inspection.faults
    certifier = LayerCertifier(capture, model, model_differs=same_model.outcome is Outcome.FAILED)
    if not inspection.faults:
        for layer in capture.layers:
            certifier.check_layer(layer)
            progress.advance(layer, num_bytes=0)
        certifier.check_model_sites()
    checks = certifier.checks()
    return [
        *manifest_checks,
        digests.check("tensors agree with their digests"),
        *([replace(check, found=_DAMAGED) for check in checks] if inspection.faults else checks),
        # Variants: other correct ways to compute a layer in BF16, which widen the noise floor.
        *check_variants(capture),
    ]


def _check_complete(capture: Capture) -> Check:
    manifest = capture.manifest
    found = f"{len(manifest.complete_layers)} of {len(capture.description.run.span)} layers are stored"
    return claim("complete", is_right=manifest.is_complete, found=found)


def _check_versions(capture: Capture) -> Check:
    versions = capture.description.provenance.versions
    unknown = [name for name in _FIRST_GOOD if name not in versions]
    if unknown:
        found = f"the golden records no version of {', '.join(unknown)}"
        return Check(name="versions", outcome=Outcome.NOT_CHECKED, found=found)
    broken = find_broken_versions(versions)
    used = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)
    found = "; ".join(broken) or f"{used}: none known to be broken"
    return claim("versions", is_right=not broken, found=found)


def _check_dtypes(capture: Capture) -> Check:
    provenance = capture.description.provenance
    dtypes = provenance.dtypes
    expected = router_dtypes(capture.graph, dtypes.get("weights", ""))
    found = ", ".join(f"{name} {dtypes.get(name, 'unknown')}" for name in expected)
    is_right = all(dtypes.get(name) == dtype for name, dtype in expected.items())
    return claim("float32_router", is_right=is_right, found=found)


def _check_model(capture: Capture, model: GoldenModel | None) -> Check:
    """Check that the golden was made of this model; without a model, return the check as not made."""
    if model is None:
        return Check(name="same_model", outcome=Outcome.NOT_CHECKED, found=NO_MODEL)
    recorded = capture.description.provenance.model
    # Before any layer is read: another model may lack some of the golden's.
    if model.spec.digest() != recorded.spec_digest:
        return claim("same_model", is_right=False, found="config.json describes another model")
    actual = fingerprint_model(model.reader, model.spec, capture.description.run.span)
    differing = [layer for layer, digest in actual.layers.items() if recorded.layers.get(layer) != digest]
    found = (
        f"norms or router of layers {differing[:4]} differ" if differing else "config, norms and router agree"
    )
    return claim("same_model", is_right=not differing, found=found)


def find_broken_versions(versions: Mapping[str, str]) -> list[str]:
    """Return each recorded version that is known to be broken, with the reason."""
    return [
        f"{package} {versions[package]}: {reason}"
        for package, (first_good, reason) in _FIRST_GOOD.items()
        if package in versions and _version_key(versions[package]) < _version_key(first_good)
    ]


def _version_key(version: str) -> tuple[tuple[int, ...], bool]:
    """Return a key to sort versions by: other texts first, a pre-release, such as 5.23.0.dev0, before its release."""
    match = re.match(r"(\d+(?:\.\d+)*)(\.?(?:dev|a|b|rc)\d+)?", version)
    if match is None:
        return (), False
    # 5.23 and 5.23.0 are one version.
    numbers = re.sub(r"(\.0)+$", "", match[1]).split(".")
    return tuple(int(number) for number in numbers), match[2] is None
