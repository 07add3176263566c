"""The command `mm2-diagnose`: names the known mistakes that explain a port's errors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compare.options import NamedSides, layers_options, report_option, sides_options
from minimax_tools.command_line.console import (
    Mm2Command,
    end_command,
    leave_record,
    loading,
    print_json,
    print_text,
    print_then_report,
    version_option,
)
from minimax_tools.command_line.options import optional_model_option, output_options
from minimax_tools.errors import UsageError
from minimax_tools.hub.checkpoint_folder import resolve_config
from minimax_tools.machine.progress import LayerProgress
from minimax_tools.model.spec import ModelSpec

if TYPE_CHECKING:
    from compare.comparer import JudgedRun


def _print_catalogue(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    """Print the known mistakes and end, before the sides are read, which takes torch."""
    if not is_asked:
        return
    with loading():
        from compare.catalogue.words import catalogue_record, render_catalogue

    if context.params.get("as_json"):
        print_json(catalogue_record(), next_commands=())
    else:
        print_text(render_catalogue(), next_commands=())
    context.exit()


@click.command(cls=Mm2Command)
@optional_model_option
@sides_options
@layers_options
@click.option(
    "--mistake",
    "mistakes",
    multiple=True,
    metavar="NAME",
    help="Mistake to try. Repeat for several. Default: all in the catalogue.",
)
@click.option(
    "--list",
    is_flag=True,
    expose_value=False,
    callback=_print_catalogue,
    help="Print the catalogue of mistakes, and end.",
)
@click.option(
    "--prove",
    "proves",
    is_flag=True,
    help="Undo each named mistake in the port, and judge its layer again. The port's code is executed.",
)
@click.option(
    "--target",
    "port",
    metavar="PATH.py:NAME|…",
    help="Port to run for --prove, as for mm2-test. Default: the one that the run names.",
)
@report_option
@output_options
@version_option
def main(
    model: str | None,
    sides: NamedSides,
    layer_pattern: str | None,
    mistakes: tuple[str, ...],
    proves: bool,
    port: str | None,
    report_path: Path | None,
    as_json: bool,
) -> None:
    """Name the known mistakes that explain a port's wrong layers.

    The layers that a comparison blames are diagnosed, and the wrong sites outside the layers: embedding, final norm,
    logits. Of layers blamed for the same sites, two that nothing explains are enough: the others are listed. With
    --layer or --layer-pattern the chosen layers are, blamed or not, and sites outside the layers only if
    the choice is all layers of the run.

    With --prove, each named mistake is undone in the port, whose layer is run and judged again. A diagnosis that was
    made before of the same captures is not made again.

    Exits with 0 if none of these differs, with 1 if the port does, whether its mistake is named or not.

    Example: mm2-diagnose --model DIR --golden GOLDEN --run RUN
    """
    with loading():
        from compare.diagnosis.diagnose import diagnose
        from compare.diagnosis.kept_diagnosis import KeptDiagnosis, digest_question, note_change
        from compare.diagnosis.proving import prove_diagnosis
        from compare.diagnosis.report import diagnosis_record, render_diagnosis
        from compare.next_commands import after_diagnosis
        from compare.run_report import report_run
        from compare.sides.pairing import select_layers
        from minimax_tools.capture.run_commands import RunCommands

    if model is None:
        raise UsageError(
            "no checkpoint was named", next_step="Give --model the one that the golden was made of."
        )
    # A model that mm2 does not know is refused before anything is judged.
    ModelSpec.from_folder(resolve_config(model))
    reference, target = sides.open()
    # None stands for the layers that the comparison blames; --layer comes as a pattern too.
    layers = None if layer_pattern is None else select_layers(reference, target, layer_pattern)
    question = digest_question(reference, target, model=model, layers=layers, mistakes=mistakes)
    kept = KeptDiagnosis.find(target.directory, question) if proves and question and not report_path else None
    # A report draws the comparison too, which a kept diagnosis does not hold.
    judged: list[JudgedRun] = []
    diagnosis = kept or diagnose(
        reference,
        target,
        model=model,
        layers=layers,
        mistakes=mistakes,
        open_progress=lambda num_layers: LayerProgress(num_layers, label="Diagnosis"),
        take_run=judged.append,
    )
    if question and kept is None:
        KeptDiagnosis(question=question, diagnosis=diagnosis).keep(target.directory)
    if proves and diagnosis.findings:
        diagnosis = prove_diagnosis(
            diagnosis,
            reference,
            target,
            model=model,
            port=port,
            open_progress=lambda num_proofs: LayerProgress(num_proofs, label="Proof"),
        )
    commands = RunCommands.of(reference, target, model=model, target=port, reading=sides.reading_arguments)
    following = after_diagnosis(diagnosis, commands, options=_chosen(layer_pattern, mistakes))
    diagnosis = replace(diagnosis, notes=(*diagnosis.notes, *note_change(diagnosis, target)))
    report = None
    if report_path:
        report = partial(report_run, judged[0], report_path, next_commands=following, diagnosis=diagnosis)
    text = "" if as_json else render_diagnosis(diagnosis, proves=proves)
    leave_record(lambda: diagnosis_record(diagnosis), text, next_commands=following)
    if as_json:
        print_json(diagnosis_record(diagnosis), next_commands=following)
        if report:
            report()
    else:
        print_then_report(text, report, next_commands=following)
    end_command(diagnosis.exit_code)


def _chosen(layer_pattern: str | None, mistakes: tuple[str, ...]) -> tuple[str, ...]:
    layers = () if layer_pattern is None else ("--layer-pattern", layer_pattern)
    return (*layers, *(word for name in mistakes for word in ("--mistake", name)))
