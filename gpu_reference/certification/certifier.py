"""Certifier: checks a finished golden before it is trusted, layer by layer, one layer's tensors in memory.

What can be checked of the capture alone is; what takes the model is checked where it is here, and named where not.
The proofs of `certify` refuse a model before it runs; these hold what it stored against mm2's own float32 layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpu_reference.certification.check_tally import claim
from gpu_reference.certification.checked_capture import CheckedCapture
from gpu_reference.certification.layer_certifier import NO_MODEL, GoldenModel, LayerCertifier
from gpu_reference.certification.variant_check import check_variants
from minimax_tools.capture.certificate import Certificate, Check, Outcome
from minimax_tools.capture.proof import digest_file
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.fingerprint import ModelFingerprint
from minimax_tools.command_line.progress import Progress
from minimax_tools.provenance import library_versions

_ROUTER_DTYPES = ("router_gate", "correction_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenVersions:
    """The versions of a package before the first good one."""

    package: str
    first_good: str
    why: str

    def is_among(self, version: str) -> bool:
        """Whether a version is one of them."""
        return _numbers(version) < _numbers(self.first_good)


BROKEN_VERSIONS = (
    BrokenVersions(
        package="transformers",
        first_good="5.23",
        why="it ignores rotary_dim and rotates whole heads (transformers#48241)",
    ),
)


def find_broken(versions: Mapping[str, str]) -> list[str]:
    """Each recorded version that is known to be broken, in words."""
    return [
        f"{broken.package} {versions[broken.package]}: {broken.why}"
        for broken in BROKEN_VERSIONS
        if broken.package in versions and broken.is_among(versions[broken.package])
    ]


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


class Certifier:
    """Checks one golden.

    Args:
        capture: The golden.
        model: What it was made of; None where that is not here.
    """

    def __init__(self, capture: Capture, model: GoldenModel | None) -> None:
        self._capture = capture
        self._model = model

    def certify(self, progress: Progress) -> Certificate:
        """Check everything that can be checked here.

        Raises:
            CheckpointError: A layer of the model cannot be read.
        """
        capture = self._capture
        checks = [self._check_complete(), self._check_versions(), self._check_dtypes(), self._check_model()]
        is_same_model = checks[-1].outcome is not Outcome.FAILED
        golden = CheckedCapture(capture)
        inputs = golden.read_inputs()
        layers = LayerCertifier(golden, self._model, inputs, is_same_model=is_same_model)
        for layer in capture.layers:
            layers.take(layer)
            progress.advance(layer, num_bytes=0)
        if inputs is not None:
            golden.read_model_sites(inputs.attention_mask.bool())
        checks += [*golden.checks(), *layers.checks(), *check_variants(capture)]
        return Certificate(
            checks=tuple(checks),
            content=capture.manifest.content_digest(),
            files={path.name: digest_file(path) for path in sorted(capture.directory.glob("*.safetensors"))},
            versions=library_versions(),
        )

    def _check_complete(self) -> Check:
        manifest = self._capture.manifest
        wanted = self._capture.description.run.span
        found = f"{len(manifest.complete_layers)} of {len(wanted)} layers are stored"
        return claim("complete", is_right=manifest.is_complete, found=found)

    def _check_versions(self) -> Check:
        versions = self._capture.description.provenance.versions
        broken = find_broken(versions)
        known = ", ".join(
            f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions
        )
        return claim(
            "versions", is_right=not broken, found="; ".join(broken) or f"{known}: none known to be broken"
        )

    def _check_dtypes(self) -> Check:
        dtypes = self._capture.description.provenance.dtypes
        found = ", ".join(f"{name} {dtypes.get(name, 'unknown')}" for name in _ROUTER_DTYPES)
        is_right = all(dtypes.get(name) == "float32" for name in _ROUTER_DTYPES)
        return claim("float32_router", is_right=is_right, found=found)

    def _check_model(self) -> Check:
        """Whether the model that is here is the one that the golden was made of."""
        if self._model is None:
            return Check(name="same_model", outcome=Outcome.NOT_CHECKED, found=NO_MODEL)
        made = self._capture.description.provenance.model
        here = ModelFingerprint.of(self._model.reader, self._model.spec, self._capture.description.run.span)
        if here.spec_digest != made.spec_digest:
            return claim("same_model", is_right=False, found="config.json describes another model")
        other = [layer for layer, digest in here.layers.items() if made.layers.get(layer) != digest]
        found = f"norms or router of layers {other[:4]} differ" if other else "config, norms and router agree"
        return claim("same_model", is_right=not other, found=found)
