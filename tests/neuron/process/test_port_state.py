"""A port that changes its process: its working folder, umask, streams and signals. mm2 keeps its own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from neuron.process.status import port_state


def process_state() -> tuple[object, ...]:
    umask = os.umask(0)
    os.umask(umask)
    return Path.cwd(), umask, sys.stdout, sys.stderr, signal.getsignal(signal.SIGTERM)


def disturb(folder: Path) -> None:
    os.chdir(folder)
    os.umask(0o777)
    sys.stdout = sys.stderr = sys.__stdin__  # type: ignore[assignment]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def test_what_a_port_changes_is_mm2s_again_and_the_ports_in_its_next_block(tmp_path: Path) -> None:
    before = process_state()
    with port_state():
        disturb(tmp_path)
        changed = process_state()
        with port_state():  # blocks nest
            assert process_state() == changed
        assert process_state() == changed
    assert process_state() == before
    assert before != changed
    with port_state():
        assert process_state() == changed
        for value, was in zip(process_state(), before, strict=True):
            assert value != was
        os.chdir(before[0])  # type: ignore[arg-type]
        os.umask(before[1])  # type: ignore[arg-type]
        sys.stdout, sys.stderr = before[2], before[3]  # type: ignore[assignment]
        signal.signal(signal.SIGTERM, before[4])  # type: ignore[arg-type]
    with port_state():
        assert process_state() == before


def test_folder_that_is_gone_is_no_error(tmp_path: Path) -> None:
    before = Path.cwd()
    with port_state():
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
    assert Path.cwd() == before
    with port_state():
        assert Path.cwd() == before
