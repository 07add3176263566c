"""Models fetched from a hub that fails, lies and is shared: what arrives is whole and right, or an error says why."""

from __future__ import annotations

import logging
import multiprocessing
import random
from collections.abc import Mapping
from pathlib import Path

import torch
from cpu_golden import write_model
from hub_server import Fault, HubServer, content_hash

from minimax_tools.errors import Mm2Error
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.checkpoint_folder import resolve_model
from minimax_tools.synthetic.toy_model import SyntheticModel
from torture.tally import Tally

_NUM_ROUNDS = 200
_NUM_PAIRS = 5
_MOST_FAULTS = 6
_MODEL = "owner/name"
_EVIL_NAMES = (
    "../../evil.json",
    "/tmp/mm2-evil.json",
    "a/../../evil.json",
    "..\\evil.json",
    "snapshots/../../../evil",
)
_STATUSES = (401, 403, 404, 408, 416, 429, 500, 502, 503, 504)


def run_transfers(scratch: Path, seed: int) -> Tally:
    """Fetch a model from a hub with drawn faults, into caches with drawn damage; then by two processes at once."""
    drawn = random.Random(seed)
    logging.getLogger("minimax_tools").setLevel(logging.ERROR)  # every new attempt is a warning
    tally = Tally(
        promise="what a hub gives is whole and right, or an error says why; nothing lands elsewhere"
    )
    source = scratch / "source"
    write_model(source, SyntheticModel(num_hidden_layers=2), dtype=torch.bfloat16)
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    num_fetched = 0
    for number in range(_NUM_ROUNDS):
        with HubServer() as hub:
            served = files | dict.fromkeys(drawn.sample(_EVIL_NAMES, drawn.randrange(3)), b"{}")
            hub.add(_MODEL, served)
            place = scratch / f"round-{number}"
            num_fetched += _fetch(tally, hub, place, files, drawn)
    for number in range(_NUM_PAIRS):
        with HubServer() as hub:
            hub.add(_MODEL, files)
            _fetch_twice(tally, hub, scratch / f"pair-{number}", files)
    tally.figures["fetched_whole"] = num_fetched
    return tally


def _fetch(
    tally: Tally, hub: HubServer, place: Path, files: Mapping[str, bytes], drawn: random.Random
) -> bool:
    """Fetch once with faults, and then without; return whether the first already gave the model."""
    told = [_plant(hub, files, drawn) for _ in range(drawn.randrange(1, _MOST_FAULTS))]
    outside = place / "outside"
    outside.mkdir(parents=True)
    (outside / "kept").write_bytes(b"kept")
    access = _access(hub, place / "cache")
    is_whole = False
    for what in (f"faults {told}", f"again after faults {told}"):
        try:
            folder = resolve_model(_MODEL, access=access)
        except Mm2Error as error:
            tally.check(bool(error.next_step) and what[0] == "f", f"{what}: {type(error).__name__}: {error}")
        except Exception as error:
            tally.check(False, f"{what}: {type(error).__name__}: {error}")
        else:
            is_whole = is_whole or what[0] == "f"
            wrong = [name for name in files if (folder / name).read_bytes() != files[name]]
            tally.check(not wrong, f"{what}: wrong {wrong}")
        # Faults that are left over must not spoil the second.
        hub.forget_faults()
    strays = [path for path in place.rglob("*evil*") if path.is_file()]
    strays += [path for path in outside.iterdir() if path.name != "kept"]
    tally.check(not strays and not Path("/tmp/mm2-evil.json").exists(), f"{told}: files at {strays}")
    return is_whole


def _plant(hub: HubServer, files: Mapping[str, bytes], drawn: random.Random) -> str:
    name = drawn.choice(sorted(files))
    data = files[name]
    path = f"/content/{content_hash(name, data)}/" if name.endswith(".safetensors") else name
    faults = {
        "status": Fault(status=drawn.choice(_STATUSES)),
        "break": Fault(
            after_bytes=drawn.randrange(max(1, len(data))), ending=drawn.choice(("close", "reset"))
        ),
        "corrupt": Fault(is_corrupt=True),
        "whole": Fault(ignores_range=True),
        "etag": Fault(status=200, headers={"ETag": drawn.choice(('"../../evil"', '"/evil"', '""'))}),
    }
    kind = drawn.choice(sorted(faults))
    times = drawn.randrange(1, 4)
    hub.plant(
        "HEAD" if kind == "etag" else "GET", name if kind == "etag" else path, faults[kind], times=times
    )
    return f"{kind} of {name} {times}×"


def _fetch_twice(tally: Tally, hub: HubServer, place: Path, files: Mapping[str, bytes]) -> None:
    """Let two processes fetch the same model into one cache at once."""
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_resolve, args=(hub.endpoint, place / "cache", place / f"folder-{number}"))
        for number in range(2)
    ]
    place.mkdir()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    tally.check(codes == [0, 0], f"two at once: exit codes {codes}")
    for number in range(2):
        folder = Path((place / f"folder-{number}").read_text(encoding="utf-8"))
        wrong = [name for name in files if (folder / name).read_bytes() != files[name]]
        tally.check(not wrong, f"two at once: wrong {wrong}")
    asked = [one.file for one in hub.asked("GET") if one.file.endswith(".safetensors")]
    tally.check(len(asked) == len(set(asked)), f"two at once: fetched more than once: {sorted(asked)}")


def _resolve(endpoint: str, cache: Path, told: Path) -> None:
    access = HubAccess(endpoint=endpoint, cache_dir=cache, first_delay_s=0.01, timeout_s=5)
    told.write_text(str(resolve_model(_MODEL, access=access)), encoding="utf-8")


def _access(hub: HubServer, cache: Path) -> HubAccess:
    return HubAccess(endpoint=hub.endpoint, cache_dir=cache, first_delay_s=0.001, timeout_s=5, num_attempts=3)
