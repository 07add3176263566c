"""Tally of dumps: figures of the chained runs of whole models, and those that went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from figures import Figure

from faults.cases import WHOLE, DumpCase


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
