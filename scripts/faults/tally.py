"""Tally: figures of the cases with the goals of BENCHMARKS.md, and the cases that went wrong.

A case is one layer of one run, judged with all sites shown and as a black box, by its output alone. Above the floor: a
mistake that changes more than noise at one of its sites. Distinguishable: one that does so at the layer's output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from figures import Figure
from scipy.special import betaincinv

from faults.cases import WHOLE, Case, DumpCase
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


def give_dump_figures(cases: Sequence[DumpCase]) -> Iterator[Figure]:
    """Yield detection and blame with the checkpoint, detection without it, and false alarms."""
    # A view is the sites that a dump shows. Above the floor are mistakes that change one of them by more than noise.
    above = [case for case in cases if case.is_above_floor]
    with_checkpoint = [case for case in above if case.has_checkpoint]
    if with_checkpoint:
        detected = [case for case in with_checkpoint if case.is_detected]
        yield Figure.plain("dumps_above_floor", len(with_checkpoint))
        yield Figure.share("dumps_detected_%", [case.is_detected for case in with_checkpoint], at_least=97)
        yield Figure.share("dumps_layer_named_%", [case.is_layer_named for case in detected], at_least=100)
        for view in dict.fromkeys(case.view for case in with_checkpoint):
            yield from _view_figures(view, [case for case in with_checkpoint if case.view == view])
    without_checkpoint = [case for case in above if not case.has_checkpoint]
    if without_checkpoint:
        yield Figure.share(
            "dumps_without_checkpoint_detected_%", [case.is_detected for case in without_checkpoint]
        )
        yield Figure.exactly(
            "dumps_without_checkpoint_passed", sum(case.is_passed for case in without_checkpoint), 0
        )
    clean = [case for case in cases if not case.is_mistake]
    if clean:
        yield Figure.plain("clean_dumps", len(clean))
        yield Figure.exactly("false_alarms_dumps", sum(case.is_detected for case in clean), 0)
        num_undecided = sum(
            case.has_checkpoint and not case.is_passed and not case.is_detected for case in clean
        )
        yield Figure.plain("clean_dumps_with_checkpoint_incomparable", num_undecided)


def dump_misses(cases: Sequence[DumpCase]) -> Iterator[tuple[str, DumpCase]]:
    """Yield each case that went wrong, with a word for it."""
    for case in cases:
        # Without the checkpoint mm2 may call a wrong run incomparable, but never pass it.
        must_be_found = case.is_above_floor and case.has_checkpoint
        if case.is_above_floor and case.is_passed:
            yield "false pass", case
        elif must_be_found and not case.is_detected:
            yield "missed", case
        elif must_be_found and not case.is_layer_named:
            yield "wrong layer", case
        elif not case.is_mistake and case.is_detected:
            yield "false alarm", case


def _view_figures(view: str, with_checkpoint: Sequence[DumpCase]) -> Iterator[Figure]:
    """Yield detection and blame of the mistakes above the floor in one view."""
    detected = [case for case in with_checkpoint if case.is_detected]
    yield Figure.share(f"dumps_{view}_detected_%", [case.is_detected for case in with_checkpoint])
    yield Figure.share(f"dumps_{view}_layer_named_%", [case.is_layer_named for case in detected])
    if view == WHOLE:
        # In other views mm2 must also suspect the sites that they hide.
        yield Figure.share(f"dumps_{view}_site_named_%", [case.is_site_named for case in detected])


# Effect, in noise floors, from which a port must not pass. The ρ of right ports reaches 1.5 over all tokens. A mistake
# of one floor and the noise of one floor make a ρ of √2: such a port may pass.
_BEYOND_DOUBT = 2.0
# Names of the figures.
TRIED, PASSED = "wrong_things", "false_passes"


def give_pass_figures(cases: Sequence[Case], dumps: Sequence[DumpCase]) -> Iterator[Figure]:
    """Count wrong things and those that pass: each run of a port is one, and each view (set of shown sites) of a dump.

    A port or dump is wrong if a mistake changes a shown site by two noise floors or more: right implementations may
    differ by less. Changes of one to two floors are counted apart, and so are ports that show their output alone.
    """
    ports = _by_run([case for case in cases if _effect(case) >= _BEYOND_DOUBT])
    beyond_doubt = {run[0].run for run in ports}
    faint = _by_run([case for case in cases if _effect(case) >= 1.0 and case.run not in beyond_doubt])
    wrong_dumps = [case for case in dumps if case.is_mistake and case.effect >= _BEYOND_DOUBT]
    faint_dumps = [case for case in dumps if case.is_above_floor and case.effect < _BEYOND_DOUBT]
    counts = {
        "ports": (len(ports), _count_passed(ports)),
        "dumps": (len(wrong_dumps), sum(case.is_passed for case in wrong_dumps)),
    }
    tried = sum(number for number, _ in counts.values())
    if not tried:
        return
    # The goal of 1 000 counts damaged captures and dying ports too, which tests try.
    yield Figure.plain(TRIED, tried)
    yield Figure.exactly(PASSED, sum(passed for _, passed in counts.values()), 0)
    for name, (number, passed) in counts.items():
        if number:
            yield Figure.plain(f"{PASSED}_of_{number}_{name}", passed)
    if faint or faint_dumps:
        passed = _count_passed(faint) + sum(case.is_passed for case in faint_dumps)
        yield Figure.plain(f"passed_near_the_floor_of_{len(faint) + len(faint_dumps)}", passed)
    # Ports that show their output alone, which differs beyond doubt.
    black_boxes = _by_run(
        [
            case
            for case in cases
            if case.is_mistake and min(case.effect, case.effects.get("output", 0.0)) >= _BEYOND_DOUBT
        ]
    )
    if black_boxes:
        passed = sum(all(case.black_box_verdict in ("pass", "warn") for case in run) for run in black_boxes)
        yield Figure.plain(f"{PASSED}_of_{len(black_boxes)}_black_boxes", passed)


def _effect(case: Case) -> float:
    """Return the effect of a layer's mistake in noise floors; of two planted at once (`halves`), the larger one."""
    if case.halves:
        return max(case.effects.get(site, 0.0) for sites in case.halves for site in sites)
    return case.effect if case.is_mistake else 0.0


def _count_passed(runs: Sequence[Sequence[Case]]) -> int:
    """Count the runs that ended in exit code 0; all cases of a run hold its verdict."""
    return sum(all(case.is_passed for case in run) for run in runs)


def _by_run(cases: Sequence[Case]) -> list[list[Case]]:
    """Group the cases, which are layers, by run."""
    runs: dict[str, list[Case]] = {}
    for case in cases:
        runs.setdefault(case.run, []).append(case)
    return list(runs.values())
