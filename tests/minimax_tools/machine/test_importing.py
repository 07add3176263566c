"""Imports of libraries without collections of garbage."""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path

import pytest

from minimax_tools.machine.importing import importing


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A library that is imported anew, and says whether garbage was collected meanwhile."""
    (tmp_path / "mm2_new_library.py").write_text("import gc\nis_collecting = gc.isenabled()\nvalues = [[]]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mm2_new_library", raising=False)
    return "mm2_new_library"


def test_nothing_is_collected_while_a_library_is_imported_nor_is_the_library_looked_at_later(
    library: str,
) -> None:
    num_frozen = gc.get_freeze_count()
    with importing():
        module = importlib.import_module(library)
    assert not module.is_collecting
    assert gc.isenabled()
    assert gc.get_freeze_count() > num_frozen
    assert not any(found is module.values for found in gc.get_objects())


def test_a_block_that_imports_nothing_freezes_nothing() -> None:
    num_frozen = gc.get_freeze_count()
    made: list[object] = [[]]
    with importing():
        pass
    # What was frozen before may be gone meanwhile.
    assert gc.get_freeze_count() <= num_frozen
    assert any(found is made for found in gc.get_objects())


def test_collections_that_were_off_stay_off_and_an_error_puts_them_on_again() -> None:
    with pytest.raises(ImportError), importing():
        importlib.import_module("mm2_no_such_library")
    assert gc.isenabled()
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
