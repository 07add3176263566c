"""Tally: figures of the cases with the goals of BENCHMARKS.md, and the cases that went wrong.

A case is one layer of one run, judged with all sites shown and as a black box, by its output alone. Above the floor: a
mistake that changes more than noise at one of its sites. Distinguishable: one that does so at the layer's output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from figures import Figure
from scipy.special import betaincinv

from faults.cases import Case
from faults.rivals import RULES


def give_figures(cases: Sequence[Case]) -> Iterator[Figure]:
    """Yield detection and naming of mistakes, false alarms on right layers, and the same of other tools' rules."""
    above = [case for case in cases if case.is_above_floor]
    clean = list(clean_cases(cases))
    if any(case.is_mistake for case in cases):
        yield from _detection_figures(cases, above)
        learned = [case for case in above if case.is_learned]
        if learned:
            yield Figure.share("detected_on_learned_%", [case.is_detected for case in learned], at_least=99)
    pairs = [case for case in cases if case.is_pair_above_floor]
    if pairs:
        yield Figure.plain("pairs_above_floor", len(pairs))
        yield Figure.share("both_of_a_pair_named_%", [case.is_pair_blamed for case in pairs], at_least=99)
    asked = [case for case in cases if case.named is not None]  # the diagnosis ran; it may have named nothing
    if asked:
        yield from _naming_figures(asked)
    if clean:
        yield from _alarm_figures(clean)
    for rule in RULES:
        yield from _rule_figures(rule, above, clean)


def clean_cases(cases: Sequence[Case]) -> Iterator[Case]:
    """Yield the layers without a mistake, each computation once.

    Right layers beside a planted one are left out: they also run in the port without a mistake.
    """
    planted = {case.run for case in cases if case.kind != "right"}
    for case in cases:
        if case.kind == "equivalent" or (case.kind == "right" and case.run not in planted):
            yield case


def misses(cases: Sequence[Case]) -> Iterator[tuple[str, Case]]:
    """Yield each case that went wrong, and each mistake below the noise floor, with a word for it."""
    for case in cases:
        if case.is_above_floor and not case.is_detected:
            yield "missed", case
        elif case.is_above_floor and not case.is_site_named:
            yield "wrong site", case
        elif case.is_pair_above_floor and not case.is_pair_blamed:
            yield "not both", case
        elif (
            case.kind == "catalogued"
            and case.is_distinguishable
            and case.named is not None
            and not case.is_named
        ):
            yield f"named {', '.join(name for name, _ in case.named) or 'nothing'}", case
        elif case.is_right and case.is_alarmed:
            yield "false alarm", case
        elif case.is_mistake and not case.is_above_floor:
            yield ("below the floor, found" if case.is_detected else "below the floor"), case


def upper_bound(hits: int, trials: int) -> float:
    """Compute the one-sided Clopper-Pearson upper bound of a rate, with 95 % confidence."""
    if trials == 0 or hits >= trials:
        return 1.0
    return float(betaincinv(hits + 1, trials - hits, 0.95))


def _detection_figures(cases: Sequence[Case], above: Sequence[Case]) -> Iterator[Figure]:
    """Yield the figures of mistakes above the noise floor, and of those below it."""
    detected = [case for case in above if case.is_detected]
    yield Figure.plain("mistakes_above_floor", len(above))
    yield Figure.share("detected_%", [case.is_detected for case in above], at_least=99)
    uncatalogued = [case for case in above if case.kind == "uncatalogued"]
    if uncatalogued:
        yield Figure.share(
            "detected_uncatalogued_%", [case.is_detected for case in uncatalogued], at_least=99
        )
    # Runs in which a right layer fails beside a wrong one.
    misled = {case.run for case in cases if case.kind == "right" and case.is_detected}
    is_layer_named = [bool(case.blamed) and case.run not in misled for case in detected]
    yield Figure.share("layer_named_%", is_layer_named, at_least=100)
    yield Figure.share("site_named_%", [case.is_site_named for case in detected], at_least=99)
    is_confined = [case.is_blame_confined and case.run not in misled for case in detected]
    yield Figure.share("nothing_else_blamed_%", is_confined, at_least=99)
    distinguishable = [case for case in above if case.is_distinguishable]
    yield Figure.plain("distinguishable_by_output", len(distinguishable))
    yield Figure.share("black_box_detected_%", [case.black_box_detected for case in above])
    by_output = [case.black_box_detected for case in distinguishable]
    yield Figure.share("black_box_detected_of_distinguishable_%", by_output)
    below = [case for case in cases if case.is_mistake and not case.is_above_floor]
    yield Figure.plain("mistakes_below_floor", len(below))
    yield Figure.share("detected_below_floor_%", [case.is_detected for case in below])


def _naming_figures(asked: Sequence[Case]) -> Iterator[Figure]:
    """Yield how often the diagnosis names the mistake by the output alone."""
    catalogued = [case for case in asked if case.kind == "catalogued" and case.is_distinguishable]
    yield Figure.plain("mistakes_asked_for_by_name", len(catalogued))
    yield Figure.share("mistake_named_%", [case.is_named for case in catalogued], at_least=95)
    yield Figure.share("mistake_named_first_%", [case.is_named_first for case in catalogued])
    uncatalogued = [bool(case.named) for case in asked if case.kind == "uncatalogued"]
    yield Figure.share("uncatalogued_given_a_name_%", uncatalogued)
    wrongly = [bool(case.named) and not case.is_named for case in asked]
    yield Figure.share("given_a_wrong_name_%", wrongly, at_most=1)
    harmless = [bool(case.named) for case in asked if case.kind == "equivalent"]
    yield Figure.plain("equivalents_given_a_name", sum(harmless))


def _alarm_figures(clean: Sequence[Case]) -> Iterator[Figure]:
    """Yield the right layers that fail, with all sites or by the output alone; equivalents are right too."""
    num_alarms = sum(case.is_alarmed for case in clean)
    yield Figure.plain("clean_layer_comparisons", len(clean))
    yield Figure.exactly("false_alarms", num_alarms, 0)
    yield Figure.plain("false_alarms_upper_bound_%", 100 * upper_bound(num_alarms, len(clean)))
    # Trained models, and synthetic ones, whose weights are drawn at random.
    for word, is_learned, goal in (("learned", True, 3000), ("drawn", False, 1000)):
        alarms = [case.is_alarmed for case in clean if case.is_learned is is_learned]
        if alarms:
            yield Figure.at_least(f"clean_layer_comparisons_{word}", len(alarms), goal)
            yield Figure.exactly(f"false_alarms_{word}", sum(alarms), 0)
    yield Figure.share("clean_layers_with_a_warning_%", [bool(case.warned) for case in clean])
    equivalents = [case.is_alarmed for case in clean if case.kind == "equivalent"]
    yield Figure.plain("equivalents", len(equivalents))
    yield Figure.exactly("equivalents_flagged", sum(equivalents), 0)


def _rule_figures(rule: str, above: Sequence[Case], clean: Sequence[Case]) -> Iterator[Figure]:
    """Yield the mistakes and the right layers of which another tool's rule calls a site, or the output, different."""
    for word, group in (("detected", above), ("false_alarms", clean)):
        if group:
            yield Figure.share(f"{rule}_{word}_%", [bool(case.rivals[rule]) for case in group])
            by_output = ["output" in case.rivals[rule] for case in group]
            yield Figure.share(f"{rule}_black_box_{word}_%", by_output)
