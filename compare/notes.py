"""Notes: sentences on what a reader must know beside the verdict; and the judged tokens in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from compare.limits.limits import backend_of, computes_in_float32
from compare.sides.sides import Sides
from minimax_tools.capture.run_commands import certify_golden
from minimax_tools.capture.source import CaptureSource
from minimax_tools.capture.store import GOLDEN_SIDE
from minimax_tools.errors import format_count, list_names
from minimax_tools.model.inputs import format_positions
from minimax_tools.model.sites import Site
from minimax_tools.model.span import word_layers
from minimax_tools.reference.variant_names import DEFAULT_NUM_VARIANTS
from minimax_tools.results.results import Blame, RouterDtype, SiteResult, SiteStatus

_MAX_NAMED = 8


def gather_notes(
    sides: Sides,
    sites: tuple[SiteResult, ...],
    blame: tuple[Blame, ...],
    *,
    layers_of_unknown_input: Sequence[int | None],
    num_undecided: int,
    unproved: Sequence[int],
    router_dtypes: tuple[RouterDtype, ...],
    outputs_missing: Sequence[int],
) -> tuple[str, ...]:
    """Return all notes on a comparison, in the order in which a report shows them.

    `num_undecided` counts the sites that differ, perhaps through an input that was not captured. `unproved` are layers
    that a pass does not prove right, `outputs_missing` those that classic limits could not judge.
    """
    return (
        *sides.reference.row_notes,
        *_reading_notes(sides),
        *_unsure_notes(sides, layers_of_unknown_input, num_undecided, unproved),
        *_nonfinite_notes(sites, blame),
        *_pass_notes(sites),
        *_side_notes(sides.reference, sides.target),
        *_certificate_notes(sides.reference),
        # What was read without a digest to check it by.
        *(f"{name}: {source.digest_note}" for name, source in _named(sides) if source.digest_note),
        *_floor_notes(sides.reference),
        *_port_notes(sides),
        # Router dtypes change experts, and show in no single tensor.
        *(
            f"the port holds {part.name} in {part.target}, the golden in {part.reference}: {part.consequence}"
            for part in router_dtypes
        ),
        *_flip_notes(sites, sides),
        *_classic_notes(sides, outputs_missing),
        *_further_notes(sides),
    )


def word_tokens(reference: CaptureSource, target: CaptureSource) -> str:
    """Return the tokens of both sides in words, such as `81 at positions 0-47`; empty if no side is mm2's own."""
    for source in (reference, target):
        # Another tool's dump does not describe its run, nor hold its inputs.
        if source.known_description is not None:
            inputs = source.read_inputs()
            return f"{int(inputs.is_kept.sum())} at {format_positions(inputs)}"
    return ""


def _named(sides: Sides) -> tuple[tuple[str, CaptureSource], ...]:
    return ("golden", sides.reference), ("run", sides.target)


def _reading_notes(sides: Sides) -> Iterator[str]:
    """Tell how another tool's dump was read, and which sides stopped before their end."""
    for name, source in _named(sides):
        yield from (f"{name}: {note}" for note in source.notes)
    for name, source in _named(sides):
        if not source.is_complete:
            yield f"the {name} is not complete: run it again and it resumes"


def _further_notes(sides: Sides) -> Iterator[str]:
    names = dict.fromkeys(name for layer in sides.target.layers for name in sides.target.further(layer))
    if names:
        yield f"further outputs of the run, stored and not judged: {list_names(list(names), most=_MAX_NAMED)}"


def _unsure_notes(
    sides: Sides, unknown_input: Sequence[int | None], num_undecided: int, unproved: Sequence[int]
) -> Iterator[str]:
    """Name the layers of which a pass, or a difference, proves nothing, and tell what would settle them."""
    if unknown_input:
        names = ", ".join(map(str, unknown_input))
        yield f"nothing tells what was fed to layer {names}: that it is the golden's input was not checked"
    if num_undecided:
        yield (
            f"{num_undecided} sites differ behind an input that was not captured: the difference may come from there. "
            "Capture the layers' inputs, or say in a map where they lie"
        )
    if unproved:
        names = ", ".join(map(str, unproved))
        remedy = (
            "--model DIR computes what a right layer makes of the port's own input"
            if sides.weights is None
            else "capture router_experts, router_logits or post_norm of the port, or run its layers one by one"
        )
        yield (
            f"nothing proves layer{'s' * (len(unproved) > 1)} {names}: a layer that inherits errors, or whose end was "
            f"judged on no token, may be wrong and pass. To settle it: {remedy}"
        )


def _nonfinite_notes(sites: tuple[SiteResult, ...], blame: tuple[Blame, ...]) -> tuple[str, ...]:
    """Name the first site with NaN or Inf on a real token, unless it is blamed already."""
    for site in sites:
        if site.judged_metrics is not None and site.judged_metrics.num_nonfinite_target:
            if any(site.layer == blamed.layer and site.site in blamed.sites for blamed in blame):
                return ()
            place = site.site if site.layer is None else f"{site.site} of layer {site.layer}"
            return (f"the first NaN or Inf on a real token is at {place}",)
    return ()


def _pass_notes(sites: tuple[SiteResult, ...]) -> tuple[str, ...]:
    """Tell what the sites that pass are not alike in, such as their dtype: a note for each reason."""
    places: dict[str, list[SiteResult]] = {}
    for site in sites:
        # Flips within the noise are counted elsewhere.
        if site.status is SiteStatus.PASS and site.reason and site.routing is None:
            places.setdefault(site.reason, []).append(site)
    return tuple(
        f"{word_layers(site.layer for site in alike)}, "
        f"{', '.join(dict.fromkeys(site.site for site in alike))}: {reason}"
        for reason, alike in places.items()
    )


def _side_notes(reference: CaptureSource, target: CaptureSource) -> tuple[str, ...]:
    """Warn if the sides are one capture, or the reference is no golden."""
    if reference.directory.resolve() == target.directory.resolve():
        return ("both sides are the same capture: nothing is proved by comparing it with itself",)
    description, target_description = reference.known_description, target.known_description
    if description is None or description.side == GOLDEN_SIDE:
        return ()
    note = f"--golden is a run of {description.provenance.target} on a device, not a golden"
    if target_description is not None and target_description.side == GOLDEN_SIDE:
        note += ", and --run is a golden: exchange --golden and --run"
    return (note,)


def _certificate_notes(reference: CaptureSource) -> tuple[str, ...]:
    """Warn if the golden is not certified, or failed a check."""
    description = reference.known_description
    if description is None or description.side != GOLDEN_SIDE or not reference.is_complete:
        # An incomplete golden has a note already; it is certified at its end.
        return ()
    certificate = reference.certificate
    if certificate is None:
        command = certify_golden(reference.directory, description.provenance.model_source)
        return (f"the golden is not certified: {command}",)
    if certificate.failed:
        return tuple(
            f"the golden FAILED certification, and proves nothing: {check.name}: {check.found}"
            for check in certificate.failed
        )
    if certificate.not_checked:
        unchecked = ", ".join(check.name for check in certificate.not_checked)
        return (f"the golden's certificate is partial; not checked: {unchecked}",)
    return ()


def _floor_notes(reference: CaptureSource) -> Iterator[str]:
    """Tell what the golden lacks of its noise floor, and what that costs; float32 goldens have no noise to measure."""
    description = reference.known_description
    if computes_in_float32(reference):
        return
    if description is None or description.noise_floor == "off":
        yield (
            "the golden kept no noise floor: the port is judged by what BF16 costs at each site of synthetic models, "
            "which is coarser"
        )
        return
    if description.noise_floor == "stats":
        yield "the golden kept only the floor's statistics: ρ is an estimate"
    if not description.floor_variants:
        yield (
            "the golden measured no other right roundings, so the port is judged more coarsely: "
            f"mm2-gpu … --floor-variants {DEFAULT_NUM_VARIANTS} measures them"
        )


def _port_notes(sides: Sides) -> Iterator[str]:
    """Warn of tokens that no golden judges, of limits measured on other backends, and of weights that mm2 converted."""
    if sides.reference.read_generation() is None and sides.target.read_generation() is not None:
        yield (
            "the golden generated no tokens, so those of the port were not compared: mm2-gpu full --max-new-tokens N "
            "makes a golden that has them"
        )
    backend, limits = backend_of(sides.target), sides.criteria.noise
    if not (sides.is_classic or backend is None or limits.is_measured_on(backend)):
        measured = ", ".join(sorted(limits.backends or ()))
        yield (
            f"the limits were measured on {measured}, not on {backend}: up to {limits.slack:g} times a limit warns "
            f"(scripts/calibrate.py --backends {backend} measures them there)"
        )
    description = sides.target.known_description
    options = {} if description is None else description.provenance.options
    if options.get("converted_by") == "mm2":
        yield (
            f"the weights were converted by {options['conversion']}; a mistake in the port's own conversion does not "
            "show"
        )


def _flip_notes(sites: tuple[SiteResult, ...], sides: Sides) -> tuple[str, ...]:
    """Count the flips that cannot be replayed without weights, and tell how to judge them."""
    if sides.weights is not None:
        return ()
    flipped = {site.layer for site in sites if site.routing is not None and site.routing.num_flipped}
    left_out = [
        site
        for site in sites
        if site.layer in flipped and site.site == str(Site.MOE_DELTA) and site.num_set_aside
    ]
    if not left_out:
        return ()
    tokens = format_count(sum(site.num_set_aside for site in left_out), "token")
    return (
        f"{tokens} in {format_count(len(left_out), 'layer')} went to other experts, not judged behind them: "
        "--model judges them against the golden with the port's own experts",
    )


def _classic_notes(sides: Sides, outputs_missing: Iterable[int]) -> tuple[str, ...]:
    """State the five classic limits, and the layers whose output they could not judge."""
    if not sides.is_classic:
        return ()
    limits = f"the limits on layer outputs: {sides.criteria.classic}"
    missing = word_layers(outputs_missing)
    if not missing:
        return (limits,)
    return limits, f"no output of {missing} was compared: capture it, or judge by --criteria noise"
