"""`mm2-gpu certify`: checks a finished golden, and puts the result into its manifest."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import click

from gpu_reference.certification.certifier import Certifier
from gpu_reference.certification.layer_certifier import GoldenModel
from minimax_tools.capture.certificate import Certificate, Outcome
from minimax_tools.capture.manifest import Manifest
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import GOLDEN_SIDE, newest_capture
from minimax_tools.capture.writer import store_certificate
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.console import Mm2Command, end_command, print_json
from minimax_tools.command_line.options import captures_option, optional_model_option, output_options
from minimax_tools.command_line.progress import LayerProgress
from minimax_tools.errors import IncomparableError
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.json_codec import encode
from minimax_tools.model.spec import ModelSpec

_MARKS = {Outcome.PASSED: "[ok]", Outcome.FAILED: "[FAILED]", Outcome.NOT_CHECKED: "[not checked]"}


@click.command("certify", cls=Mm2Command, epilog="\b\nExample: mm2-gpu certify --model DIR --golden GOLDEN")
@optional_model_option
@click.option(
    "--golden",
    type=click.Path(path_type=Path),
    help="The golden; else the newest under --captures.",
)
@captures_option
@output_options
def certify_command(model: str | None, golden: Path | None, captures: Path, as_json: bool) -> None:
    """Check a finished golden before it is trusted; the result becomes a part of it.

    Digests of its tensors, NaN, recorded versions and dtypes, and the width of the norms of q and k are checked of
    the golden alone. With --model transformers' float32 layers are held against mm2's own, on the golden's inputs, the
    choice of experts against the checkpoint's float32 bias, and the rotary width against config.json: one layer is in
    memory, of its experts one. What could not be checked is named.

    Exits with 1 where a check failed.
    """
    directory = golden or newest_capture(captures, GOLDEN_SIDE)
    certificate = certify_golden(directory, model)
    if as_json:
        print_json({"directory": str(directory), "certificate": encode(certificate)})
    else:
        click.echo(render_certificate(directory, certificate))
    end_command(0 if certificate.has_passed else 1)


def certify_golden(directory: Path, model: str | None) -> Certificate:
    """Check a golden, and put the result into its manifest.

    Args:
        directory: The golden.
        model: A folder or a hub's id; None where the model is not here.

    Raises:
        CaptureError: There is no golden, or its manifest cannot be written.
        CheckpointError: The model cannot be read.
        IncomparableError: The capture is a device run.
    """
    capture = Capture.open(directory)
    if capture.description.side != GOLDEN_SIDE:
        raise IncomparableError(
            f"{directory} is no golden",
            expected="a capture of mm2-gpu",
            found=f"a run of {capture.description.provenance.target} on a device",
            next_step="Judge it against a golden: mm2-compare.",
        )
    with LayerProgress(len(capture.layers), label="Certify") as progress:
        if model is None:
            certificate = Certifier(capture, None).certify(progress)
        else:
            certificate = _certify_with_model(capture, model, progress)
    manifest: Manifest = store_certificate(directory, certificate)
    assert manifest.certificate is certificate, "it was just put there"
    return certificate


def render_certificate(directory: Path, certificate: Certificate) -> str:
    """A certificate as text, a line for each check."""
    verdict = "certified" if certificate.has_passed else "NOT CERTIFIED"
    lines = [f"{directory}: {verdict}, {certificate}"]
    lines += [f"  {_MARKS[check.outcome]:14}{check.name}: {check.found}" for check in certificate.checks]
    return "\n".join(lines)


def _certify_with_model(capture: Capture, model: str, progress: Any) -> Certificate:
    spec = ModelSpec.from_folder(resolve_config(model))
    span = capture.description.run.span
    layers = range(span.start, min(span.stop, spec.num_hidden_layers))
    folder = resolve_model(model, layers=layers)
    runs_transformers = importlib.util.find_spec("transformers") is not None
    with CheckpointReader(folder, layers=layers) as reader:
        known = GoldenModel(reader=reader, spec=spec, runs_transformers=runs_transformers)
        return Certifier(capture, known).certify(progress)
