"""The certificate of a finished golden, checked layer by layer with one layer's tensors in memory.

Some checks need the capture alone, others the model too. The certificate names the checks that could not run.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from gpu_reference.certification.checked_capture import CheckedCapture
from gpu_reference.certification.golden_checks import claim
from gpu_reference.certification.layer_certifier import NO_MODEL, GoldenModel, LayerCertifier, check_variants
from gpu_reference.certification.trust import refuse_run
from minimax_tools.capture.manifest import Certificate, Check, Outcome
from minimax_tools.capture.mirror import CaptureMirror
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.writer import store_certificate
from minimax_tools.checkpoint.fingerprint import fingerprint_model
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.machine.progress import LayerProgress, Progress
from minimax_tools.model.spec import ModelSpec
from minimax_tools.provenance import library_versions

# Names among the golden's dtypes that must be float32.
_ROUTER_DTYPES = ("router_gate", "correction_bias")
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
        CheckpointError: The model cannot be read.
        IncomparableError: The capture is a device run.
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
        content_digest=capture.manifest.content_digest(),
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
    # A reader that also checks what it reads: `checked.checks()` gives the results.
    checked = CheckedCapture(capture)
    inputs = checked.read_inputs()
    model_differs = same_model.outcome is Outcome.FAILED
    certifier = LayerCertifier(checked, model, inputs, model_differs=model_differs)
    for layer in capture.layers:
        certifier.check_layer(layer)
        progress.advance(layer, num_bytes=0)
    # None if the inputs' file is damaged: padding is unknown then, and the digests check fails.
    if inputs is not None:
        checked.check_model_sites(inputs.is_kept)
    # Variants: other correct ways to compute a layer in BF16, which widen the noise floor.
    return [*manifest_checks, *checked.checks(), *certifier.checks(), *check_variants(capture)]


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
    dtypes = capture.description.provenance.dtypes
    found = ", ".join(f"{name} {dtypes.get(name, 'unknown')}" for name in _ROUTER_DTYPES)
    is_right = all(dtypes.get(name) == "float32" for name in _ROUTER_DTYPES)
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
