"""No code of a pickle runs, whatever it holds, and reading one is bounded in time.

Pickles are read as `pytorch_model.bin` of a checkpoint and as a tensor of a dump. Each of the hostile ones calls a
function that makes a file; the file must not be there afterwards.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from minimax_tools.cli import mm2_split
from neuron.cli import main as mm2_test
from torture.hostile_world import Outcome, run_command
from torture.tally import Tally

_PROMISE = "no pickle runs code, and each ends within a second with an error that names it"
_LONGEST_S = 1.0
_NUM_RANDOM = 64
_CONFIG = '{"model_type": "minimax_m2", "hidden_size": 8, "num_hidden_layers": 1}'
_TENSOR = "captured_tensors_cte_step_1_module_model.layers.0.input_layernorm_output.pt"
_CALLS: tuple[str, ...] = (
    "os.system",
    "posix.system",
    "subprocess.call",
    "builtins.exec",
    "builtins.eval",
    "pathlib.Path.touch",
)
_CALLS += ("torch._utils._rebuild_tensor_v2.__globals__", "builtins.getattr", "runpy.run_path", "shutil.copy")


def run_hostile_pickles(scratch: Path, seed: int) -> Tally:
    """Read hostile pickles in two places, and count those that ran code, took long, or were not named."""
    tally = Tally(promise=_PROMISE)
    mark = scratch / "ran"
    model, dump = scratch / "model", scratch / "dump"
    model.mkdir()
    dump.mkdir()
    (model / "config.json").write_text(_CONFIG)
    places = (
        (
            model / "pytorch_model.bin",
            mm2_split,
            ("plan", "--model", model, "--node", "a:memory=1GB", "--quiet"),
        ),
        (dump / _TENSOR, mm2_test, ("show", dump, "--format", "nxdi", "--quiet")),
    )
    for name, content in hostile_pickles(mark, random.Random(seed)):
        for path, command, words in places:
            path.write_bytes(content)
            fault = find_fault(run_command(command, *words), path, mark)
            tally.check(fault is None, f"{name} as {path.name}: {fault}")
            mark.unlink(missing_ok=True)
    return tally


def find_fault(outcome: Outcome, path: Path, mark: Path) -> str | None:
    """Say how a command broke the promise; None if it kept it."""
    if mark.exists():
        return "its code ran"
    if outcome.is_traceback or "--debug for the traceback" in outcome.one_line:
        return f"no typed error: {outcome.one_line}"
    if outcome.exit_code != 3:
        return f"exit code {outcome.exit_code}: {outcome.one_line}"
    if outcome.seconds > _LONGEST_S:
        return f"{outcome.seconds:.1f} s"
    return None if path.name in outcome.one_line else f"not named: {outcome.one_line}"


def hostile_pickles(mark: Path, draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of files of torch.save, in both layouts."""
    for name, pickled in _pickles(mark, draw):
        yield f"{name}, alone", pickled
        yield f"{name}, in an archive", _archive(pickled)


def _pickles(mark: Path, draw: random.Random) -> Iterator[tuple[str, bytes]]:
    for protocol in range(5):
        yield f"a call, protocol {protocol}", pickle.dumps(_Call(mark), protocol=protocol)
        yield f"a call in a dict, protocol {protocol}", pickle.dumps({"x": [_Call(mark)]}, protocol=protocol)
    for name in _CALLS:
        module, _, function = name.rpartition(".")
        callee, argument = f"c{module}\n{function}\n".encode(), _text(_command(mark))
        yield f"REDUCE of {name}", callee + b"(" + argument + b"tR."
        yield f"INST of {name}", b"(" + argument + f"i{module}\n{function}\n.".encode()
        yield f"OBJ of {name}", b"(" + callee + argument + b"o."
        yield f"BUILD of {name}", callee + b")\x81}" + _text("__setstate__") + callee + b"sb."
    yield "60 lists that hold each other three times", _widening_lists(60)
    yield "500 000 nested tuples", b"(" * 500_000 + b"t" * 500_000 + b"."
    yield "500 000 tuples of one, nested", b")" + b"\x85" * 500_000 + b"."
    yield "500 000 nested lists", b"(" * 500_000 + b"l" * 500_000 + b"."
    yield "a list that holds itself", b"]q\x00h\x00a."
    yield "a memo of 2**31", b"]r\xff\xff\xff\x7f."
    yield "text of 2**60 bytes", b"\x8d" + struct.pack("<Q", 1 << 60) + b"."
    yield "a frame of 2**60 bytes", b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"."
    yield "an extension", b"\x82\x01."
    yield "a persistent id", b"Pthe id\n."
    yield "no end", b"(" * 1000
    whole = pickle.dumps(_Call(mark), protocol=2)
    for number in range(_NUM_RANDOM):
        yield f"random {number}", _changed(whole, draw)


class _Call:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return os.system, (_command(self._mark),)


def _text(text: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(text.encode())) + text.encode()


def _command(mark: Path) -> str:
    return f"touch {mark}"


def _widening_lists(depth: int) -> bytes:
    """Return lists each of which holds the one before three times: 3**depth leaves in few bytes."""
    content = b"]q\x00"
    for number in range(depth):
        get = b"h" + bytes([number])
        content += b"](" + get * 3 + b"eq" + bytes([number + 1])
    return content + b"."


def _archive(pickled: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        # As protocol 2, the only one that is read.
        archive.writestr(
            "archive/data.pkl", pickled if pickled[:1] == pickle.PROTO else b"\x80\x02" + pickled
        )
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


def _changed(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(changed))
        # The command's own bytes stay, so that code that ran shows.
        if changed[place] not in b"touch/":
            changed[place] = draw.randrange(256)
    return bytes(changed)
