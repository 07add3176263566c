"""Measures how far ports that are right go, and writes the limits of the verdict that follow.

    python scripts/calibrate.py --measurements FILE.jsonl --output compare/calibration.yaml

Every run adds its records to the file of measurements, and the limits are fitted to all that it holds: a calibration
may be made in several sittings, and on several machines (on a Neuron device: --backends neuron-xla). What it writes
is read by `mm2-compare --criteria FILE.yaml` too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibration_text import limits_text
from clean_ports import GOLDENS, MODES, SHAPES, Bench, Setting, clean_ports
from figures import describe_machine
from fit_limits import Table, fit_floorless, fit_ratios, widen
from measure_noise import FLOORS, measure

from minimax_tools.provenance import library_versions

# Of comparisons of right ports, those that may fail; float32 has next to no noise: clean runs stay below 3e-6. A limit
# on another backend must be broken by half as much again.
_SCALARS = {"level": 1e-3, "float32": 1e-5, "slack": 1.5}


def main() -> int:
    """Measure, fit and write."""
    arguments = _parse()
    if not arguments.fit_only:
        _measure_all(arguments)
    with arguments.measurements.open() as file:
        records = [json.loads(line) for line in file]
    arguments.output.write_text(calibrate(records), encoding="utf-8")
    print(f"{arguments.output}: limits from {len(records)} judged sites", file=sys.stderr)
    return 0


def calibrate(records: Sequence[dict[str, Any]]) -> str:
    """The calibration file that follows from the records."""
    tables = {}
    for mode in ("isolated", "chained"):
        tables[mode] = fit_ratios(records, mode=mode, floor="full")
        estimated = fit_ratios(records, mode=mode, floor="stats")
        # On machines whose bits differ more than these, the estimate goes as far as what it estimates.
        tables[f"{mode}_estimated"] = widen(estimated, tables[mode])
    if any(record["floor"] == "full_variants" for record in records):
        tables |= fit_variants(records)
    tables["without_floor"] = fit_floorless(records, tables["isolated"])
    runs = {(*_run_of(record), record["layer"]) for record in records}
    measured = {
        "made_by": "scripts/calibrate.py",
        "machine": describe_machine(),
        "versions": library_versions(),
        "torch": sorted({record["torch"] for record in records}),
        "ports": sorted({record["port"] for record in records}),
        "shapes": sorted({record["shape"] for record in records}),
        "seeds": sorted({record["seed"] for record in records}),
        "runs": len({run[:-1] for run in runs}),
        "layers": len(runs),
        "judged_sites": len(records),
    }
    backends = tuple(sorted({record["port"].split(" on ")[1].split(",")[0] for record in records}))
    return limits_text(tables, scalars=_SCALARS, backends=backends, measured=measured)


def fit_variants(records: Sequence[dict[str, Any]]) -> dict[str, Table]:
    """The limits of isolated layers whose golden's floor is widened by variants.

    A run that was held against the golden's own floor alone went no further than it would in a wider unit: it counts
    too, unless its port computes as a variant does.
    """
    widened, estimated = (
        fit_ratios(
            [record for record in records if record["floor"] == f"{floor}_variants"]
            + [
                {**record, "floor": f"{floor}_variants"}
                for record in records
                if record["floor"] == floor and not _is_variant(record)
            ],
            mode="isolated",
            floor=f"{floor}_variants",
        )
        for floor in ("full", "stats")
    )
    return {"isolated_variants": widened, "isolated_variants_estimated": widen(estimated, widened)}


def _is_variant(record: dict[str, Any]) -> bool:
    """Whether a port rounds as the variants do, and the golden does not."""
    port, golden = str(record["port"]), str(record["golden"])
    return port.startswith("transformers Eager") and golden != "eager, eager"


def _measure_all(arguments: argparse.Namespace) -> None:
    settings = [
        Setting(shape=shape, seed=seed, lengths=lengths, attention=attention, experts=experts)
        for shape in arguments.shapes
        for seed in arguments.seeds
        for lengths in arguments.lengths
        for attention, experts in GOLDENS
    ]
    ports = [
        port
        for port in clean_ports(arguments.backends, tp_degrees=arguments.tp_degrees)
        if not arguments.ports or port.name in arguments.ports
    ]
    with arguments.measurements.open("a") as file:
        for setting in settings:
            with tempfile.TemporaryDirectory() as scratch:
                bench = Bench.build(setting, Path(scratch))
                runs = bench.run_ports(ports, Path(scratch) / "run", modes=arguments.modes)
                for port, mode, run in runs:
                    for record in measure(bench, setting, port, mode, run, floors=arguments.floors):
                        file.write(json.dumps(record) + "\n")
            file.flush()
            print(setting, file=sys.stderr)


def _run_of(record: dict[str, Any]) -> tuple[Any, ...]:
    names = ("shape", "seed", "golden", "port", "mode")
    return (*(record[name] for name in names), tuple(record["lengths"]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measurements", type=Path, required=True, help="JSON lines; added to.")
    parser.add_argument("--output", type=Path, required=True, help="The limits, as YAML.")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["toy", "wide"],
        help=f"Of synthetic models ({', '.join(SHAPES)}), and folders of trained ones.",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=parse_lengths,
        default=[(96, 61, 7), (24, 17), (12,), (3, 1)],
        help="Of the prompts of a batch, one batch after the other: 96,61,7 24,17",
    )
    parser.add_argument("--backends", nargs="+", default=["cpu", "xla-cpu"])
    parser.add_argument("--tp-degrees", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--ports", nargs="+", default=[], help="Names of implementations; all by default.")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--floors", nargs="+", choices=FLOORS, default=list(FLOORS), help="Of the goldens.")
    parser.add_argument("--fit-only", action="store_true", help="Measure nothing more.")
    return parser.parse_args()


def parse_lengths(text: str) -> tuple[int, ...]:
    """The lengths of a batch's prompts, such as `96,61,7`."""
    return tuple(int(length) for length in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
