"""Whole ports with planted mistakes, and right ones, through `mm2-test model`: how many are found, placed and named.

    python scripts/bench_model_ports.py                        two toy models, both backends of a CPU
    python scripts/bench_model_ports.py --backends cpu --only head_tied bucket_mask

A mistake is *detected* if the verdict is `fail`; *placed* if the first finding is at its pass, layer and site; *named*
if the first finding has its name. A right port with the verdict `fail` is a false alarm.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_logits import Ground
from faults.model_ports import FirstPass, ModelPlant, choose_model_ports
from figures import Figure, benchmark_parser, print_figures

from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

# A trained model of another shape than the synthetic one, in the repository.
_TRAINED = Path(__file__).parents[1] / "tests" / "models" / "learned"
_LENGTHS = "28,17,21"
_BACKENDS = ("cpu", "xla-cpu")
_MODELS = ("synthetic", "trained")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCase:
    """A planted whole port, as it was judged."""

    plant: ModelPlant
    where: str  # the model and the backend
    record: Mapping[str, Any]  # what `mm2-test model` printed; empty if the port could not be run

    @property
    def verdict(self) -> str:
        """The verdict; empty if the port could not be run."""
        return str(self.record.get("verdict", ""))

    @property
    def first(self) -> Mapping[str, Any]:
        """The first finding: its pass, layer, sites and named mistake; empty if there is none."""
        return next(iter(self.record.get("findings", ())), {})

    @property
    def is_detected(self) -> bool:
        """True if the verdict is `fail`; of a mistake that no number shows, also if it warns."""
        return self.verdict == "fail" or (self.plant.first is FirstPass.NONE and self.verdict == "warn")

    @property
    def is_placed(self) -> bool:
        """True if the first finding is at the planted pass, layer and site."""
        layer, sites = self.first.get("layer"), set(self.first.get("sites", ()))
        is_at_layer = layer in self.plant.layers if self.plant.layers else layer is None
        return self.is_detected and self._is_at_pass and is_at_layer and bool(sites & set(self.plant.sites))

    @property
    def is_named(self) -> bool:
        """True if the first finding has the mistake's name, or none if it must have none."""
        return (self.first.get("mistake") or "") in self.plant.names

    @property
    def _is_at_pass(self) -> bool:
        number, in_chunks = self.first.get("number"), bool(self.first.get("in_chunks"))
        if in_chunks or self.plant.first is FirstPass.CHUNKS:
            # The pass is one of several tokens behind a cache.
            return in_chunks and self.plant.first is FirstPass.CHUNKS
        if self.plant.first is FirstPass.PREFILL:
            return number == 0
        if self.plant.first is FirstPass.DECODE:
            # A prefill may fill the cache wrongly, which its own numbers do not show.
            return "cache" in self.first.get("sites", ()) or (number or 0) > 0
        return True

    def __str__(self) -> str:
        place = "pass {number}, layer {layer}, {sites}: {mistake}".format(**self.first) if self.first else "-"
        return f"{self.where} {self.plant.name}: {self.verdict or 'could not be run'}, {place}"


def main() -> int:
    """Run all chosen ports and print the figures; 1 if a mistake was missed or a right port failed."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=(), metavar="PORT", help="names of ports (default: all)")
    parser.add_argument("--backends", nargs="+", choices=_BACKENDS, default=_BACKENDS)
    parser.add_argument("--models", nargs="+", choices=_MODELS, default=_MODELS)
    arguments = parser.parse_args()
    cases = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.models:
            ground = make_ground(name, Path(scratch))
            for backend in arguments.backends:
                for plant in choose_model_ports(arguments.only):
                    if backend in plant.backends:
                        cases.append(judge(plant, ground, backend=backend, where=f"{name} {backend}"))
                        print(cases[-1], file=sys.stderr, flush=True)
    return print_figures("model_ports", list(give_figures(cases)), as_json=arguments.json)


def make_ground(name: str, scratch: Path) -> Ground:
    """Make a model, unless it is the trained one, and its golden, with four decoding steps."""
    model, dtype = _TRAINED, torch.float8_e4m3fn
    if name == "synthetic":
        model = scratch / "model"
        synthesize(model, model=SyntheticModel(), dtype=dtype, shard_size_bytes=4_000_000, seed=0)
    words = ("--seq-len", _LENGTHS, "--max-new-tokens", "4")
    return Ground.make(model, scratch, "full", *words, name=name)


def judge(plant: ModelPlant, ground: Ground, *, backend: str, where: str) -> ModelCase:
    """Run a whole port and judge it."""
    ranks = ("--tp-degree", str(plant.num_ranks)) if plant.num_ranks > 1 else ()
    record = ground.run(
        "model", plant.target, *ranks, backend=backend, variables=plant.variables, must_run=False
    )
    return ModelCase(plant=plant, where=where, record=record)


def give_figures(cases: Sequence[ModelCase]) -> Iterator[Figure]:
    """Yield how many mistakes are detected, placed and named, and the verdicts on right ports."""
    wrong = [case for case in cases if not case.plant.is_right]
    right = [case.verdict for case in cases if case.plant.is_right]
    if wrong:
        yield Figure.plain("runs with a mistake", len(wrong))
        yield Figure.exactly("detected", sum(case.is_detected for case in wrong), len(wrong))
        yield Figure.plain("placed", sum(case.is_placed for case in wrong))
        yield Figure.plain("named", sum(case.is_named for case in wrong))
    if right:
        yield Figure.plain("runs of right ports", len(right))
        for verdict in ("pass", "warn", "incomparable"):
            yield Figure.plain(f"right ports: {verdict}", right.count(verdict))
        yield Figure.exactly("false alarms", right.count("fail") + right.count(""), 0)


if __name__ == "__main__":
    sys.exit(main())
