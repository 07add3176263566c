"""Notes: what a reader of a comparison must know of how another tool's dump was read."""

from __future__ import annotations

from collections.abc import Sequence

from minimax_tools.dumps.name_map import NameMap
from minimax_tools.dumps.piece import Dump, DumpPiece, word_modules

_NUM_NAMED = 6


def dump_notes(
    dump: Dump,
    names: NameMap,
    *,
    passes: tuple[tuple[str, ...], ...],
    left: tuple[str, ...],
    unmapped: tuple[str, ...],
    marks: Sequence[DumpPiece],
) -> tuple[str, ...]:
    """What of a dump is not read, and what is taken for granted.

    Args:
        dump: The dump.
        names: What is known of it beside its files.
        passes: Those that are read.
        left: Those that are not, though they hold the same modules.
        unmapped: Modules that map to no site.
        marks: Pieces that stand for what the tool did not find.
    """
    return (
        *_pass_notes(passes, left),
        *_unmapped_notes(unmapped),
        *_mark_notes(marks),
        *_one_rank_notes(dump, names),
    )


def _pass_notes(passes: tuple[tuple[str, ...], ...], left: tuple[str, ...]) -> tuple[str, ...]:
    read = [step for group in passes for step in group]
    if not left:
        return ()
    shown = ", ".join(left[:_NUM_NAMED]) + (" …" if len(left) > _NUM_NAMED else "")
    return (
        f"of {len(read) + len(left)} passes {', '.join(read)} is read, not {shown}: a map's steps choose others",
    )


def _unmapped_notes(modules: tuple[str, ...]) -> tuple[str, ...]:
    if not modules:
        return ()
    worded = word_modules(modules)
    shown = ", ".join(worded[:_NUM_NAMED]) + (" …" if len(worded) > _NUM_NAMED else "")
    number = f"{len(modules)} modules map" if len(modules) > 1 else "1 module maps"
    return (f"{number} to no site: {shown}",)


def _mark_notes(marks: Sequence[DumpPiece]) -> tuple[str, ...]:
    if not marks:
        return ()
    worded = word_modules(str(piece) for piece in marks)
    shown = ", ".join(worded[:_NUM_NAMED]) + (" …" if len(worded) > _NUM_NAMED else "")
    return (f"a single zero stands for what the tool did not find: {shown}",)


def _one_rank_notes(dump: Dump, names: NameMap) -> tuple[str, ...]:
    if not dump.is_one_rank or names.num_ranks is not None:
        return ()
    return (
        "this tool keeps rank 0's tensors alone, and the port is taken to have run on one rank: "
        "else say ranks in a map",
    )
