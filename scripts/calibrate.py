"""Measure the noise of right ports, and write the limits of the verdict that follow.

    python scripts/calibrate.py --measurements FILE.jsonl --output compare/limits/calibration.yaml

Each run adds its records to the file of measurements, and the limits are fitted to all records of the file. So one
calibration can be made by several runs and on several machines (on a Neuron device: --backends neuron-xla).
`--before` keeps limits whose measurements are lost. `mm2-compare --criteria FILE.yaml` reads the output too.

A golden's noise floor is kept in `full`, with float32 twins, or as `stats` alone, from which ρ is estimated. Variants
are the golden's layer with other rounding; they may widen the floor. A *table* holds the limits of each site's figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clean_ports import SHAPES, CleanModel, clean_ports, combine_settings, parse_lengths
from figures import describe_machine
from fit_limits import Table, capped, fit_floorless, fit_ratios, widen, with_model_margin
from measure_noise import measure

from compare.limits.limits import ALL_SITES, RATIO_FIGURES, Limit, NoiseLimits
from compare.limits.limits_file import read_limits
from minimax_tools.provenance import library_versions

# level: share of the comparisons of right ports that may fail.
# float32: limit without BF16 noise; right ports stay below 3e-6.
# slack: factor by which a limit must be exceeded on a backend that was not measured; other_graphs: factor on the limits
# for other graphs, of which right ports of learned models came to 1.12 of a limit (BENCHMARKS.md).
_SCALARS = {"level": 1e-3, "float32": 1e-5, "slack": 1.5, "other_graphs": 1.25}
_HEADING = """\
# mm2's limits: right ports stay below them. `mm2-compare --criteria FILE.yaml` reads files of this format.
#
# Copy what you want to change: limits that a file does not name stay as they are here. A limit is a number, or the rule
#     usual × exp(z × (spread + token_spread / √tokens)).
# A standard normal value exceeds z in a share of level ÷ (number of judged figures) of the cases. So limits are wider
# where more figures are judged, or fewer tokens. For the worst token or channel, the share is divided by their number.
# Limits of `all` hold for sites without limits of their own.
"""


def main() -> int:
    """Measure, fit and write."""
    arguments = _parse()
    if not arguments.fit_only:
        _measure_all(arguments)
    with arguments.measurements.open() as file:
        records = [json.loads(line) for line in file]
    before = None if arguments.before is None else read_limits(arguments.before)
    arguments.output.write_text(calibrate(records, before=before), encoding="utf-8")
    print(f"{arguments.output}: limits from {len(records)} judged sites", file=sys.stderr)
    return 0


def calibrate(records: Sequence[dict[str, Any]], *, before: NoiseLimits | None = None) -> str:
    """Fit the limits to the records, and return the text of the calibration file.

    Args:
        records: Records of right ports, from `measure`.
        before: Limits of earlier records. They stay if these records measured nothing for them. Limits of goldens
            without variants become no tighter, but for the cap on errors without a floor.
    """
    tables: dict[str, Table] = {}
    for mode in ("isolated", "chained"):
        if any(record["mode"] == mode for record in records):
            tables[mode] = fit_ratios(records, mode=mode, floor="full")
            tables[f"{mode}_estimated"] = _fit_estimated(records, tables[mode], mode=mode, floor="stats")
    tables["without_floor"] = fit_floorless(records, tables["isolated"])
    if before is not None:
        tables = _widen_all(tables, before)
    _cap_floorless(tables["without_floor"], tables["isolated"], records)
    if any(record["floor"] == "full_variants" for record in records):
        tables |= fit_variants(records)
    runs = {(*_run_of(record), record["layer"]) for record in records}
    measured = {
        "made_by": "scripts/calibrate.py",
        "machine": describe_machine(),
        "versions": library_versions(),
        "torch": sorted({record["torch"] for record in records}),
        "ports": sorted({record["port"] for record in records}),
        "shapes": sorted({Path(record["shape"]).name for record in records}),
        "seeds": sorted({record["seed"] for record in records}),
        "runs": len({run[:-1] for run in runs}),
        "layers": len(runs),
        "judged_sites": len(records),
    }
    # A port reads "NAME on BACKEND", or "NAME on BACKEND, N ranks".
    backends = {record["port"].split(" on ")[1].split(",")[0] for record in records}
    if before is not None:
        backends |= before.backends or set()
    return limits_text(tables, scalars=_SCALARS, backends=tuple(sorted(backends)), measured=measured)


def fit_variants(records: Sequence[dict[str, Any]]) -> dict[str, Table]:
    """Fit the limits of isolated layers whose floor variants widen, plus a margin for models not measured."""
    widened = fit_ratios(records, mode="isolated", floor="full_variants")
    estimated = _fit_estimated(records, widened, mode="isolated", floor="stats_variants")
    tables = {"isolated_variants": widened, "isolated_variants_estimated": estimated}
    return {name: with_model_margin(table) for name, table in tables.items()}


def _fit_estimated(records: Sequence[dict[str, Any]], table: Table, *, mode: str, floor: str) -> Table:
    """Fit the limits for goldens that kept only the statistics of their noise floor.

    They are at least as wide as `table`, the limits for goldens with twins: on machines whose bits differ more, the
    estimate is off as far.
    """
    ratios = {
        site: {figure: limit for figure, limit in limits.items() if figure in RATIO_FIGURES}
        for site, limits in table.items()
    }
    estimated = fit_ratios(records, mode=mode, floor=floor)
    return widen(estimated, ratios) if estimated else ratios


def _widen_all(tables: Mapping[str, Table], before: NoiseLimits) -> dict[str, Table]:
    """Widen the limits of goldens without variants to the earlier ones, and add the tables that are missing."""
    names = ("isolated", "isolated_estimated", "chained", "chained_estimated", "without_floor")
    earlier: dict[str, Table] = {
        name: {site: dict(figures) for site, figures in getattr(before, name).table.items()} for name in names
    }
    return {name: widen(tables[name], table) if name in tables else table for name, table in earlier.items()}


def _cap_floorless(table: Table, ratios: Table, records: Sequence[dict[str, Any]]) -> None:
    """Cap the limits of errors without a floor; the cap grows with the largest floor of any golden at the site."""
    floors: dict[str, float] = {}
    for record in records:
        # Numbers of experts have no floor, nor have sites outside the layers.
        floor = record.get("floor_relative") or 0.0
        floors[record["site"]] = max(floors.get(record["site"], 0.0), floor)
    for site, figures in table.items():
        if "relative_l2" in figures:
            rho = ratios.get(site, {}).get("whole", ratios[ALL_SITES]["whole"]).usual
            largest = max(floors.values()) if site == ALL_SITES else floors.get(site, 0.0)
            figures["relative_l2"] = capped(figures["relative_l2"], largest=largest, rho=rho)


def _measure_all(arguments: argparse.Namespace) -> None:
    settings = combine_settings(arguments.shapes, arguments.seeds, arguments.lengths)
    ports = clean_ports(arguments.backends, tp_degrees=arguments.tp_degrees)
    with arguments.measurements.open("a") as file:
        for setting in settings:
            with tempfile.TemporaryDirectory() as scratch:
                clean = CleanModel.build(setting, Path(scratch))
                for port, mode, run in clean.run_ports(ports, Path(scratch) / "run"):
                    for record in measure(clean, setting, port, mode, run):
                        file.write(json.dumps(record) + "\n")
            file.flush()
            print(setting, file=sys.stderr)


def _run_of(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells the run of a record from other runs."""
    names = ("shape", "seed", "golden", "port", "mode")
    return (*(record[name] for name in names), tuple(record["lengths"]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--measurements", type=Path, required=True, help="file of JSON lines; records are appended"
    )
    parser.add_argument("--output", type=Path, required=True, help="file of the limits, YAML")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["toy", "wide"],
        help=f"synthetic models ({', '.join(SHAPES)}) and folders of trained ones (default: toy wide)",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        help="seeds of weights and prompts (default: 0 1 2)",
    )
    parser.add_argument(
        "--backends", nargs="+", default=["cpu", "xla-cpu"], help="devices (default: cpu xla-cpu)"
    )
    parser.add_argument(
        "--tp-degrees",
        nargs="*",
        type=int,
        default=[2, 4],
        help="numbers of ranks that share mm2's layer (default: 2 4)",
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=parse_lengths,
        default=[(96, 61, 7), (24, 17), (12,), (3, 1)],
        help="tokens of the prompts, batch by batch (default: 96,61,7 24,17 12 3,1)",
    )
    parser.add_argument(
        "--before",
        type=Path,
        help="limits of earlier measurements (default: none). They stay if nothing is measured anew; only limits of "
        "goldens with variants, and the cap on errors without a floor, may become tighter",
    )
    parser.add_argument(
        "--fit-only", action="store_true", help="fit to the records that are there, and measure nothing"
    )
    return parser.parse_args()


def limits_text(
    tables: Mapping[str, Mapping[str, Mapping[str, Limit]]],
    *,
    scalars: Mapping[str, float],
    backends: tuple[str, ...],
    measured: Mapping[str, Any],
) -> str:
    """Return the text of the calibration file; `measured` says how the limits were measured."""
    lines = [_HEADING, "measured:"]
    lines += [f"  {name}: {json.dumps(value, ensure_ascii=False)}" for name, value in measured.items()]
    lines += ["", f"backends: [{', '.join(backends)}]"]
    lines += [f"{name}: {value:g}" for name, value in scalars.items()]
    for name, table in tables.items():
        lines += ["", f"{name}:"]
        for site, figures in table.items():
            if figures:
                lines.append(f"  {site}:")
                lines += [f"    {figure}: {_limit_text(limit)}" for figure, limit in figures.items()]
    return "\n".join(lines) + "\n"


def _limit_text(limit: Limit) -> str:
    if limit.spread == limit.token_spread == 0.0:
        return f"{limit.usual:g}"
    return f"{{usual: {limit.usual:g}, spread: {limit.spread:g}, token_spread: {limit.token_spread:g}}}"


if __name__ == "__main__":
    sys.exit(main())
