"""Views: what every report of a comparison says. Text, Markdown, page and JUnit only draw it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from minimax_tools.capture.passes import pass_name
from minimax_tools.errors import format_count
from minimax_tools.model.span import word_layers
from minimax_tools.results.results import (
    NOT_EXPOSED,
    WEIGHTS,
    BlameGroup,
    Comparison,
    GeneratedRow,
    LogitsResult,
    ModelFinding,
    PassLogits,
    SiteResult,
    SiteStatus,
    Verdict,
)
from reports.wording import word_figure, word_layer, word_place, word_port, word_sites, word_sites_by_layer

# The findings of one cause.
Cause = tuple[ModelFinding, ...]


def headline(comparison: Comparison) -> str:
    """Return the verdict and the first place to look at, such as `FAIL: layer 5, moe_delta`."""
    verdict = str(comparison.verdict).upper()
    if comparison.findings:
        return f"{verdict}: {word_first(comparison.findings)}"
    causes = causes_of(comparison)
    if causes:
        (layers, sites), *others = _sites_by_layers(causes)
        more = f" (and {format_count(len(others), 'more place')})" if others else ""
        return f"{verdict}: {word_layers(layers)}, {' and '.join(sites)}{more}"
    # Without blame, as in a chained run that was not recomputed, start at the first site that fails or warns.
    worst = {Verdict.FAIL: SiteStatus.FAIL, Verdict.WARN: SiteStatus.WARN}.get(comparison.verdict)
    for site in comparison.sites:
        if site.status is worst:
            reason = f": {site.reason}" if comparison.verdict is Verdict.WARN and site.reason else ""
            return f"{verdict}: first at {word_place(site.layer, [site.site])}{reason}"
    if comparison.router_dtypes and comparison.verdict is Verdict.WARN:
        part = comparison.router_dtypes[0]
        return f"{verdict}: {part.name} is {part.target}, the golden's {part.reference}"
    if comparison.verdict is Verdict.PASS and (comparison.shows_outputs_only or comparison.shows_logits_only):
        what = "outputs" if comparison.shows_outputs_only else "logits"
        return f"{verdict}: {what} only, {comparison.compared} of {format_count(comparison.of, 'site')}"
    return verdict


def _sites_by_layers(causes: Sequence[BlameGroup]) -> list[tuple[tuple[int | None, ...], list[str]]]:
    """Return layers with the sites of each cause in them, in the order of the causes."""
    sites_of: dict[tuple[int | None, ...], list[str]] = {}
    for cause in causes:
        sites_of.setdefault(cause.layers, []).append(", ".join(word_blamed_sites(cause)))
    return list(sites_of.items())


def word_extent(comparison: Comparison) -> str:
    """Return how many sites were compared, and where."""
    parts = [f"in {format_count(len(comparison.layers), 'layer')}"] if comparison.layers else []
    if comparison.of_layer(None):
        parts.append("outside them" if parts else "outside the layers")
    where = " and ".join(parts)
    return f"compared {comparison.compared} of {format_count(comparison.of, 'site')} {where}".rstrip()


def name_sides(comparison: Comparison) -> list[tuple[str, str]]:
    """Return what was compared, by name: golden, run, port, criteria and tokens, as far as they are known."""
    sides = [("golden", comparison.reference), ("run", comparison.target)]
    sides += [("port", word_port(comparison.port))] if comparison.port else []
    sides += [("criteria", comparison.criteria)]
    return sides + ([("tokens", comparison.tokens)] if comparison.tokens else [])


def causes_of(comparison: Comparison) -> tuple[BlameGroup, ...]:
    """Return the causes of a comparison; one for each blame if they were not grouped."""
    return comparison.blame_groups or tuple(
        BlameGroup(layers=(blamed.layer,), sites=blamed.sites, worst_layer=blamed.layer, reason=blamed.reason)
        for blamed in comparison.blame
    )


def word_blamed_sites(cause: BlameGroup) -> tuple[str, ...]:
    """Return the sites of a cause: those of one operation joined by `and`, as both are wrong."""
    return (" and ".join(cause.sites),) if cause.operation else word_sites(cause.sites)


def word_cause(cause: BlameGroup) -> str:
    """Return a place to look at, such as `layers 3-59, moe_delta`."""
    return ", ".join([word_layers(cause.layers), *word_blamed_sites(cause)])


def word_reasons(comparison: Comparison, cause: BlameGroup) -> tuple[str, ...]:
    """Return why a cause is to blame, in the worst of its layers; of one operation's sites a sentence each."""
    has_worst = len(cause.layers) > 1 and cause.sites != (WEIGHTS,)
    worst = f"worst in {word_layer(cause.worst_layer)}" if has_worst else ""
    if not cause.operation:
        return (f"{worst}: {cause.reason}" if worst else cause.reason,)
    reasons = (
        f"{blamed.sites[-1]}: {blamed.reason}"
        for blamed in comparison.blame
        if blamed.layer == cause.worst_layer and blamed.operation == cause.operation
    )
    return f"one cause, the {cause.operation}{worst and f'; {worst}'}", *reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class BlameRow:
    """Row of what is to blame: a finding of a whole port's run, or layers in which the same sites are wrong."""

    place: str
    reason: str
    of_sites: tuple[str, ...] = ()  # of a cause with several sites, a sentence on each
    where: tuple[str, ...]
    anchors: tuple[str, ...]  # compared sites of the worst layer, as `anchor_of`


def blame_rows(comparison: Comparison) -> Iterator[BlameRow]:
    """Yield what is to blame: findings that no site shows, then the causes."""
    for finding in comparison.findings:
        if not finding.is_of_sites:
            mistake = "" if finding.mistake is None else f"matches {finding.mistake}: {finding.what}"
            yield BlameRow(
                place=word_place(finding.layer, finding.sites),
                reason=finding.reason,
                where=(mistake,) if mistake else (),
                anchors=(),
            )
    for cause in causes_of(comparison):
        first, *others = word_reasons(comparison, cause)
        # A blame names sites that were not compared too, as suspects.
        compared = {site.site for site in comparison.of_layer(cause.worst_layer) if site.status.is_compared}
        yield BlameRow(
            place=word_cause(cause),
            reason=first,
            of_sites=tuple(others),
            where=cause.where,
            anchors=tuple(anchor_of(cause.worst_layer, site) for site in cause.sites if site in compared),
        )


def anchor_of(layer: int | None, site: str) -> str:
    """Return a site as part of an id in the page."""
    return f"{'model' if layer is None else layer}-{site}"


_TITLES = {
    SiteStatus.NOT_EXPOSED: "Not exposed by the port",
    SiteStatus.NOT_CAPTURED: "Not captured by the golden",
    SiteStatus.NOT_JUDGED: "Not judged",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UncomparedGroup:
    """Sites that were not compared for one reason."""

    status: SiteStatus
    title: str
    reason: str  # empty if the title says it all
    places: tuple[str, ...]  # such as `layers 0-7: q_rope, k_rope`


def group_uncompared(comparison: Comparison) -> tuple[UncomparedGroup, ...]:
    """Return the sites that were not compared, by status and reason; () if all were."""
    sites: dict[tuple[SiteStatus, str], list[SiteResult]] = {}
    for site in comparison.sites:
        if not site.status.is_compared:
            reason = "" if site.reason == NOT_EXPOSED else site.reason
            sites.setdefault((site.status, reason), []).append(site)
    return tuple(
        UncomparedGroup(
            status=status,
            title=f"{title}: {format_count(len(alike), 'site')}",
            reason=reason,
            places=word_sites_by_layer((site.layer, site.site) for site in alike),
        )
        for status, title in _TITLES.items()
        for (found, reason), alike in sites.items()
        if found is status
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """Layer of a comparison, or the model outside its layers if `layer` is None."""

    layer: int | None
    sites: tuple[SiteResult, ...]

    @property
    def name(self) -> str:
        """The layer's number, or `model`."""
        return "model" if self.layer is None else str(self.layer)

    @property
    def status(self) -> SiteStatus | None:
        """Worst status of the sites that were compared; None if none was."""
        statuses = {site.status for site in self.sites}
        order = (SiteStatus.FAIL, SiteStatus.WARN, SiteStatus.PASS)
        return next((status for status in order if status in statuses), None)

    @property
    def compared(self) -> str:
        """Number of sites that were compared, of all."""
        return f"{sum(site.status.is_compared for site in self.sites)}/{len(self.sites)}"

    @property
    def worst(self) -> SiteResult | None:
        """The site with the largest ρ."""
        return largest_rho(self.sites)


def view_layers(comparison: Comparison) -> list[LayerView]:
    """Return the layers of a comparison, ascending; last what is outside them, if anything is."""
    numbers = [*comparison.layers, *([None] if comparison.of_layer(None) else [])]
    return [LayerView(layer=layer, sites=comparison.of_layer(layer)) for layer in numbers]


def largest_rho(sites: Iterable[SiteResult]) -> SiteResult | None:
    """Return the site with the largest ρ, NaN being the largest; None if none has a noise floor."""
    known = [(site.noise.whole, site) for site in sites if site.noise]
    return max(known, key=lambda pair: (math.isnan(pair[0]), pair[0]))[1] if known else None


def measured(result: SiteResult, name: str) -> float | None:
    """Return ρ or a classic figure of a site by its name; None if it was not measured, as of numbers of experts."""
    if name == "rho":
        return None if result.noise is None else result.noise.whole
    if result.metrics is None or result.routing is not None:
        return None
    value: float | None = getattr(result.metrics, name)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallTable:
    """A table of a few rows, as words."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def token_tables(comparison: Comparison) -> Iterator[SmallTable]:
    """Yield what is known of next tokens: pass by pass, as generated, and as judged."""
    if comparison.pass_logits:
        yield view_passes(comparison.pass_logits)
    if comparison.generated:
        yield SmallTable(
            title="Generated tokens",
            columns=("prompt", "the golden's", "status", "first difference"),
            rows=tuple(
                (str(row.row), f"{row.num_alike} of {row.num_compared}", str(row.status), _difference(row))
                for row in comparison.generated
            ),
        )
    for result in comparison.sites:
        if result.logits is not None:
            yield view_logits(result.logits)


def view_passes(passes: Sequence[PassLogits]) -> SmallTable:
    """Return the next tokens of a run, or of each pass, against the golden's own."""
    return SmallTable(
        title="Next tokens, the errors of all layers included",
        columns=("pass", "tokens", "same likeliest", "KL mean", "KL worst", "worst at"),
        rows=tuple(
            (
                "all" if one.number is None else pass_name(one.number),
                str(one.num_tokens),
                str(one.num_agreeing),
                word_figure(one.kl_mean),
                word_figure(one.kl_worst),
                f"row {one.worst_token[0]}, token {one.worst_token[1]}",
            )
            for one in passes
        ),
    )


def view_logits(logits: LogitsResult) -> SmallTable:
    """Return the judged figures of the next-token distributions."""
    of_head = " of the head on the port's own last layer" if logits.is_of_head else ""
    row, position = logits.worst_token
    kl = ", ".join(map(word_figure, (logits.kl_mean, logits.kl_p95, logits.kl_worst)))
    foreseen = ", ".join(map(word_figure, (logits.kl_mean_foreseen, logits.kl_p95_foreseen)))
    return SmallTable(
        title=f"Next-token distributions{of_head}, as judged",
        columns=("figure", "value"),
        rows=(
            ("KL(golden ‖ port) in nats: mean, p95, worst", f"{kl} at row {row}, token {position}"),
            ("the same as noise foretells: mean, p95", foreseen),
            ("tokens with another likeliest next token", f"{logits.num_disagreeing} of {logits.num_tokens}"),
            ("explained by noise", str(logits.num_explained)),
            *(
                (f"of the golden's {k} likeliest the port has", f"{100 * share:.1f} %")
                for k, share in logits.overlaps.items()
            ),
            *(
                (
                    f"row {choice.row}, token {choice.position}",
                    f"{choice.target} for {choice.reference}, {word_figure(choice.margin)} below it, noise reaches "
                    f"{word_figure(choice.reach)}",
                )
                for choice in logits.worst_choices
            ),
        ),
    )


def _difference(row: GeneratedRow) -> str:
    if row.reference is None:
        return row.reason
    words = f"{row.target} for {row.reference}"
    return f"{words} ({row.reason})" if row.reason else words


def word_first(findings: Sequence[ModelFinding]) -> str:
    """Return the place of the first finding, and the number of others: `decode step 2, layers 3-5, attn_context`."""
    first, *others = group_findings(findings)
    more = f" (and {format_count(len(others), 'more finding')})" if others else ""
    return f"{word_findings(first)}{more}"


def group_findings(findings: Sequence[ModelFinding]) -> list[list[Cause]]:
    """Group causes of one pass and the same sites and name, over layers; findings of one operation are one cause."""
    causes: dict[object, list[ModelFinding]] = {}
    for number, finding in enumerate(findings):
        shared = (finding.in_chunks, finding.number, finding.layer, finding.operation)
        causes.setdefault(shared if finding.operation else number, []).append(finding)
    groups: dict[object, list[Cause]] = {}
    for cause in causes.values():
        first, sites = cause[0], tuple(finding.sites for finding in cause)
        place = (first.in_chunks, first.number, sites, first.mistake, first.layer is None)
        groups.setdefault(place, []).append(tuple(cause))
    return list(groups.values())


def word_findings(group: Sequence[Cause]) -> str:
    """Return the pass, the layers and the sites of a group of findings."""
    cause = group[0]
    first = cause[0]
    number = [] if first.number is None else [pass_name(first.number, is_chunk=first.in_chunks)]
    layers = [one[0].layer for one in group if one[0].layer is not None]
    sites = word_sites(first.sites)
    if len(cause) > 1:
        sites = (" and ".join(site for finding in cause for site in finding.sites),)
    return ", ".join([*number, *([word_layers(layers)] if layers else []), *sites])
