"""Comparison of a port with a golden in a port's own code: `compare`, `assert_site`, and the verdict."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from compare.comparer import compare_captures
from compare.limits.criteria import Criteria
from compare.limits.limits_file import calibrated_limits
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.golden_weights import CheckpointWeights, find_weights
from minimax_tools.capture.mirror import capture_folder
from minimax_tools.capture.source import CaptureSource
from minimax_tools.dumps.opening import DumpReading, open_sides
from minimax_tools.errors import IncomparableError, UsageError
from minimax_tools.model.sites import Site, parse_site
from minimax_tools.results.results import Blame, Comparison, SiteResult, SiteStatus, Verdict
from mm2.golden_layer import GoldenLayer, GoldenLayers
from mm2.recorded_capture import RecordedCapture
from mm2.recording import Recording
from reports.data import comparison_record
from reports.terminal import render_comparison
from reports.wording import word_place

# Characters of a line of the report in a test's output.
REPORT_WIDTH = 110


class PortDiffersError(AssertionError):
    """The port differs from the golden: a failed assertion, with mm2's report as its text."""

    __module__ = "mm2"  # where users find it, and what pytest's summary shows


class PortWarning(UserWarning):
    """The port passes with a warning, such as a site in another dtype than the golden's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortComparison:
    """The result of `compare`: the verdict and all that it rests on. True where the port passes, also with warnings.

    `str()` gives mm2's report, as `mm2-compare` prints it.
    """

    result: Comparison = field(repr=False)

    @property
    def verdict(self) -> Verdict:
        """`pass`, `warn`, `fail` or `incomparable`."""
        return self.result.verdict

    @property
    def compared(self) -> int:
        """Number of sites, counted in each layer, that were judged."""
        return self.result.compared

    @property
    def of(self) -> int:
        """Number of sites, counted in each layer, judged or not."""
        return self.result.of

    @property
    def blame(self) -> tuple[Blame, ...]:
        """Sites to blame, earliest layer first."""
        return self.result.blame

    @property
    def sites(self) -> tuple[SiteResult, ...]:
        """Results of all sites, layer by layer in execution order."""
        return self.result.sites

    def site(self, name: str, *, layer: int | None = None) -> SiteResult:
        """Return the result at a site.

        Args:
            name: Name of the site, such as `moe_delta`.
            layer: Number of the layer. Default: the only one that was compared.

        Raises:
            UsageError: There is no such result, or several layers were compared and none was named.
        """
        found = [one for one in self.sites if one.site == name and layer in (None, one.layer)]
        if len(found) != 1:
            raise UsageError(
                f"{len(found)} results for {name}" + ("" if layer is None else f" of layer {layer}"),
                expected="one, of " + ", ".join(dict.fromkeys(one.site for one in self.sites)),
                next_step="Name a site and, of several layers, the layer.",
            )
        return found[0]

    def require(self) -> PortComparison:
        """Return this comparison where the port passes; a warning becomes a `PortWarning`.

        Raises:
            PortDiffersError: The port differs.
            IncomparableError: Too little was compared for a verdict.
        """
        __tracebackhide__ = True
        if self.verdict is Verdict.FAIL:
            raise PortDiffersError(str(self))
        if self.verdict is Verdict.INCOMPARABLE:
            raise IncomparableError(
                f"no verdict: {self._headline()}", found="; ".join(self.result.notes) or None
            )
        if self.verdict is Verdict.WARN:
            warnings.warn(self._headline(), PortWarning, stacklevel=2)
        return self

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as `mm2-compare --json` prints it, without the commands to run next."""
        return comparison_record(self.result)

    def _headline(self) -> str:
        return str(self).partition("\n")[0]

    def __bool__(self) -> bool:
        return self.verdict in (Verdict.PASS, Verdict.WARN)

    def __str__(self) -> str:
        return render_comparison(self.result, width=REPORT_WIDTH, is_terminal=False)

    def __repr__(self) -> str:
        return f"PortComparison({self._headline()}; compared {self.compared} of {self.of} sites)"


def compare(
    reference: GoldenLayer | GoldenLayers | Recording | str | Path,
    target: Recording | str | Path,
    *,
    model: str | Path | None = None,
) -> PortComparison:
    """Judge a port against a golden, as `mm2-compare` does.

    | reference | target | judged by |
    |---|---|---|
    | a layer of a golden | a recording | the golden's noise floor |
    | a recording | a recording | limits without a noise floor, which are coarser |
    | a golden, or its place | place of a run | the golden's noise floor, all layers of the run |

    A place is a folder, or an address such as `s3://bucket/folder`.

    Args:
        reference: The trusted side.
        target: The port's side. A recording must have been given the reference's input, bit for bit.
        model: Folder or hub id of the golden's checkpoint, to judge rerouted tokens and sites behind a failing one.
            Default: the reference's, or the one that a capture was made from, if it is on this machine.

    Raises:
        IncomparableError: The sides must not be compared: other inputs, another model or dtype.
        CaptureError: A capture is missing or damaged.
        UsageError: A golden is to be compared with a recording, and no layer of it was named.
    """
    golden, port = _open_sides(reference, target)
    # A suite compares every layer: its limits are those of one comparison of all of them.
    num_parts = len(golden.layers) if isinstance(reference, GoldenLayer) else 1
    named = None if model is None else str(model)
    if isinstance(reference, GoldenLayer | GoldenLayers) and named is None:
        weights = (reference.golden if isinstance(reference, GoldenLayer) else reference).checkpoint
    else:
        weights = find_weights(named, golden, port)
    return _judge(golden, port, weights, num_parts=num_parts)


def assert_site(tensor: torch.Tensor, layer: GoldenLayer, site: str) -> SiteResult:
    """Assert that a port's tensor is right at a site of a layer, by the golden's noise floor.

        mm2.assert_site(moe(layer.read("post_norm")), layer, "moe_delta")

    Args:
        tensor: The port's value, [B,S,…] or [B·S,…], computed from the golden's input of the layer, or from the
            golden's values of the sites before.
        layer: The layer of the golden.
        site: Name of the site.

    Returns:
        The result, with ρ and the classic figures. A warning becomes a `PortWarning`.

    Raises:
        PortDiffersError: The port differs: the message names site, ρ, limit and place.
        IncomparableError: Nothing could be judged: the golden lacks the site, or no token was left.
        UsageError: No site has the name.
    """
    __tracebackhide__ = True
    named = parse_site(str(site))
    if named is Site.INPUT:
        raise UsageError(
            "a layer's input is given to it, and not judged", expected="a site that the layer computes"
        )
    port = RecordedCapture.of_tensor(tensor, named, golden=layer)
    golden = layer.golden.capture
    # As if a suite asserts every site of every layer.
    num_parts = len(golden.layers) * len({*layer.sites} - {Site.INPUT})
    comparison = _judge(golden, port, layer.golden.checkpoint, num_parts=num_parts)
    result = comparison.site(named, layer=layer.number)
    if result.status is SiteStatus.FAIL:
        raise PortDiffersError(describe_site(result))
    if not result.status.is_compared:
        raise IncomparableError(f"{_place(result)} was not judged", found=result.reason)
    if result.status is SiteStatus.WARN:
        warnings.warn(describe_site(result), PortWarning, stacklevel=2)
    return result


def describe_site(result: SiteResult) -> str:
    """Describe the result of a site in a few lines: place, reason with limit, figures, and what the errors share."""
    lines = [f"{_place(result)}: {result.reason or result.status}"]
    figures = [] if result.noise is None else [f"ρ {result.noise.whole:.3g}"]
    if result.metrics is not None:
        metrics = result.metrics
        cosine = "undefined" if metrics.cosine_similarity is None else f"{metrics.cosine_similarity:.5f}"
        figures += [f"relative L2 {metrics.relative_l2:.3g}", f"cosine {cosine}"]
        row, token, channel = metrics.worst_index
        figures += [f"worst by {metrics.max_abs_diff:.3g} at row {row}, token {token}, channel {channel}"]
    if figures:
        lines.append(f"  {', '.join(figures)}, over {result.num_judged} tokens")
    return "\n".join([*lines, *(f"  {sentence}" for sentence in result.where)])


def _open_sides(reference: object, target: Recording | str | Path) -> tuple[CaptureSource, CaptureSource]:
    if isinstance(target, Recording):
        return _recorded_sides(reference, target)
    return _captured_sides(reference, target)


def _recorded_sides(reference: object, target: Recording) -> tuple[CaptureSource, RecordedCapture]:
    if isinstance(reference, GoldenLayer):
        return reference.golden.capture, RecordedCapture.of(target, golden=reference)
    if isinstance(reference, Recording):
        return RecordedCapture.alone(reference, name="the reference"), RecordedCapture.alone(
            target, name="the port"
        )
    raise UsageError(
        "a recording is of one layer, and the reference does not say which",
        expected="a layer of a golden, or a recording",
        found=repr(reference),
        next_step="Give golden.layer(NUMBER), as in mm2.compare(mm2.open_golden(DIR).layer(5), run).",
    )


def _captured_sides(reference: object, target: str | Path) -> tuple[CaptureSource, CaptureSource]:
    if isinstance(reference, GoldenLayers):
        reference = reference.directory
    if not isinstance(reference, str | Path):
        raise UsageError(
            f"{target} names a run, and the reference names no golden",
            expected="a golden, or its folder or address",
            found=repr(reference),
            next_step="Give two folders or addresses, or a layer of a golden and a recording.",
        )
    folders = (capture_folder(reference), capture_folder(target))
    return open_sides(*folders, reference_reading=DumpReading(), target_reading=DumpReading())


def _judge(
    golden: CaptureSource, port: CaptureSource, weights: CheckpointWeights | None, *, num_parts: int
) -> PortComparison:
    """Judge one of `num_parts` equal parts of a comparison: together, right ones fail no more often than it may."""
    limits = calibrated_limits()
    limits = replace(limits, level=limits.level / num_parts)
    return PortComparison(
        result=compare_captures(
            golden,
            port,
            criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL, noise=limits),
            layer_pattern="layer_*",
            weights=weights,
        )
    )


def _place(result: SiteResult) -> str:
    return word_place(result.layer, (result.site,))
