"""Names that mm2 gives to mistakes: to ports of public reports, and to lookalikes that no catalogue holds.

- `reported`: ports with mistakes that public reports tell of: each should get its name, or be told by a blame's words.
- `lookalikes`: mistakes that look like entries of the catalogue and are none: no name is true of them but `Plant.akin`.
- Each is planted in all layers of a model, run, and diagnosed twice: with all sites shown, and as a black box.
- Each wrong name is undone in the port, as `mm2-diagnose --prove` does: none may be proved.
- Models are drawn with seeds and shapes that nothing was fitted to; `--model` adds trained ones.

    python scripts/bench_names.py --model tests/models/learned --journal names.jsonl --json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from faults import lookalikes, reported
from faults.baseline import Baseline, BaselineRequest, TrainedModel, open_baseline
from faults.journal import Journal
from faults.judging import as_black_box
from faults.plant import Plant
from faults.port import PlantedPort
from faults.proofs import make_prover
from figures import Figure, benchmark_parser, print_figures
from port_runs import run_port

from compare.catalogue.undo import undo_finding
from compare.diagnosis.diagnose import diagnose
from compare.diagnosis.finding import MistakeFinding
from compare.diagnosis.proof import ProofOutcome
from minimax_tools.model.run import sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.devices.runtime import Runtime, open_runtime

GROUPS: Mapping[str, tuple[Plant, ...]] = {"reported": reported.PLANTS, "lookalikes": lookalikes.PLANTS}
VIEWS = ("sites", "black box")
_LENGTHS = (96, 16, 16)
_STARTS = (0, 4088, 65528)
# Shapes of drawn models, unlike those that other benchmarks and limits use.
_SHAPES = (
    SyntheticModel(
        num_hidden_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rotary_dim=16,
        num_local_experts=24,
        num_experts_per_tok=3,
        intermediate_size=96,
    ),
    SyntheticModel(
        num_hidden_layers=2,
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        rotary_dim=24,
        num_local_experts=16,
        num_experts_per_tok=6,
        intermediate_size=64,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPort:
    """A port with a mistake, in one view, with the names that mm2 gave it."""

    group: str
    mistake: str
    akin: tuple[str, ...]  # names that are true of it
    model: str
    view: str
    blamed: tuple[str, ...]  # sites that are blamed in some layer
    unexplained: float  # largest ρ of a layer
    names: tuple[str, ...] = ()  # all names of all layers, each once
    is_told: bool = False  # whether a blame tells the mistake in words
    proved: tuple[str, ...] = ()  # wrong names that were proved
    figures: Mapping[str, Any] = field(default_factory=dict)  # by layer and name: parameters, ρ, share, proof
    seconds: float = 0.0  # of the diagnosis

    @property
    def wrong(self) -> tuple[str, ...]:
        """Names that are not true of the mistake."""
        return tuple(name for name in self.names if not set(name.split(" + ")) <= set(self.akin))

    @property
    def is_named(self) -> bool:
        """True if it got a name that is true of it, or is told in words, and got no other name."""
        return (bool(self.names) or self.is_told) and not self.wrong


def main() -> int:
    """Run what the journal lacks, and print; return 1 if a goal is missed, else 0."""
    arguments = _parse_arguments()
    journal = Journal(arguments.journal, NamedPort)
    cases: list[NamedPort] = []
    with tempfile.TemporaryDirectory(prefix="mm2-names-") as scratch, open_runtime("cpu") as runtime:
        for request in list_requests(arguments.drawn, arguments.model):
            plants = [
                (group, plant)
                for group in arguments.groups
                for plant in GROUPS[group]
                if not arguments.mistakes or plant.name in arguments.mistakes
            ]
            found = {plant.name: journal.find(f"{request.name}: {plant.name}") for _, plant in plants}
            cases += [case for known in found.values() for case in known or ()]
            missing = [(group, plant) for group, plant in plants if found[plant.name] is None]
            if not missing:
                continue
            with open_baseline(request, Path(scratch)) as baseline:
                for group, plant in missing:
                    named = list(name_port(baseline, group, plant, runtime, Path(scratch) / "run"))
                    journal.add(f"{request.name}: {plant.name}", named)
                    cases += named
    return print_figures("names", list(give_figures(cases)), as_json=arguments.json)


def give_figures(cases: Sequence[NamedPort]) -> Iterator[Figure]:
    """Yield the shares of ports that were named, rightly and wrongly, and the wrong names that were proved."""
    for group in GROUPS:
        of_group = [case for case in cases if case.group == group]
        if not of_group:
            continue
        yield Figure.plain(f"{group}: mistakes", len({case.mistake for case in of_group}))
        for view in VIEWS:
            seen = [case for case in of_group if case.view == view]
            yield Figure.plain(f"{group}, {view}: ports that fail", sum(bool(case.blamed) for case in seen))
            goal = 80 if group == "reported" else None
            yield Figure.share(f"{group}, {view}: named_%", [case.is_named for case in seen], at_least=goal)
            limit = 0 if group == "reported" else 1
            wrong = [bool(case.wrong) for case in seen]
            yield Figure.share(f"{group}, {view}: wrong_names_%", wrong, at_most=limit)
        yield Figure.exactly(f"{group}: wrong names proved", sum(len(case.proved) for case in of_group), 0)


def name_port(
    baseline: Baseline, group: str, plant: Plant, runtime: Runtime, directory: Path
) -> Iterator[NamedPort]:
    """Run a plant in all layers, diagnose it in both views, and undo its wrong names."""
    span = Span(0, baseline.spec.num_hidden_layers)
    port = PlantedPort(plant=plant, layers=frozenset(span)).target()
    run = sweep_run(span, sites_level="all")
    capture = run_port(
        baseline.golden, port, run, reader=baseline.reader, runtime=runtime, directory=directory / "sweep"
    )
    for view in VIEWS:
        seen = capture if view == "sites" else as_black_box(capture)
        started_s = time.process_time()
        found = diagnose(baseline.golden, seen, model=baseline.folder)
        took_s = time.process_time() - started_s
        case = NamedPort(
            group=group,
            mistake=plant.name,
            akin=(plant.name, *plant.akin),
            model=baseline.request.name,
            view=view,
            blamed=tuple(dict.fromkeys(blame.sites[-1] for layer in found.layers for blame in layer.blame)),
            unexplained=max((layer.unexplained for layer in found.layers), default=0.0),
            names=tuple(dict.fromkeys(finding.mistake for finding in found.findings)),
            is_told=bool(plant.told)
            and any(plant.told in blame.reason for layer in found.layers for blame in layer.blame),
            figures={f"{finding.layer} {finding.mistake}": _figures(finding) for finding in found.findings},
            seconds=took_s,
        )
        wrong = [finding for finding in found.findings if finding.mistake in case.wrong]
        outcomes = {}
        for one in wrong:
            shown = next(layer.sites for layer in found.layers if layer.layer == one.layer)
            outcomes[one.mistake] = _prove(baseline, plant, one, shown, runtime, directory)
        proved = tuple(name for name, outcome in outcomes.items() if outcome is ProofOutcome.PROVED)
        case = replace(case, proved=proved)
        told = ", ".join(case.names) or ("told" if case.is_told else "-")
        mark = " WRONG" if case.wrong else ""
        mark += " PROVED" if case.proved else ""
        print(
            f"{case.model}: {case.mistake}, {view}: {told}{mark} "
            f"(ρ {case.unexplained:.3g}, {', '.join(case.blamed)}; {took_s:.1f} s)",
            file=sys.stderr,
            flush=True,
        )
        yield case


def _figures(finding: MistakeFinding) -> dict[str, Any]:
    return {
        "parameters": dict(finding.parameters),
        "leaves": round(finding.leaves, 3),
        "explains": round(finding.explains, 4),
        "amplitude": round(finding.amplitude, 3),
        "z": round(finding.z, 1),
    }


def _prove(
    baseline: Baseline,
    plant: Plant,
    finding: MistakeFinding,
    shown: Sequence[Site],
    runtime: Runtime,
    directory: Path,
) -> ProofOutcome:
    """Undo a name in its layer of the port, unless the sites of the view in which it was named do not tell it."""
    assert finding.layer is not None, "no plant lies outside the layers"
    undone = undo_finding(finding.mistake, finding.parameters)
    if any(undo.may_lie_before(shown) for undo in undone):
        return ProofOutcome.NOT_PROVABLE
    port = PlantedPort(plant=plant, layers=frozenset({finding.layer})).target()
    prover = make_prover(baseline, port, finding.layer, runtime=runtime, directory=directory)
    return prover.prove(undone).outcome


def list_requests(num_drawn: int, models: Sequence[Path]) -> Iterator[BaselineRequest]:
    """Yield the baselines: drawn models of seeds that no other benchmark and no limit uses, and trained ones."""
    for number in range(num_drawn):
        yield BaselineRequest(
            name=f"drawn-{number}",
            seed=7000 + number,
            lengths=_LENGTHS,
            start_positions=_STARTS,
            num_layers=2,
            shape=_SHAPES[number % len(_SHAPES)],
        ).on_implementation(number % 2)
    for folder in models:
        model = TrainedModel.open(folder)
        yield BaselineRequest(
            name=model.name, seed=30, lengths=_LENGTHS, num_layers=model.num_layers, trained=model
        )


def _parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--groups", nargs="+", choices=tuple(GROUPS), default=tuple(GROUPS))
    parser.add_argument("--mistakes", nargs="*", default=(), metavar="NAME", help="mistakes (default: all)")
    parser.add_argument("--drawn", type=int, default=2, help="number of drawn models (default: %(default)s)")
    parser.add_argument(
        "--model", nargs="+", type=Path, default=(), metavar="DIR", help="folders of trained models"
    )
    parser.add_argument(
        "--journal", type=Path, help="file of finished ports; a later call goes on from there"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
