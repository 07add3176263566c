"""Sources of a port: its file or module, the files beside it, and their digest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from minimax_tools.errors import TargetError
from neuron.ports.sources import import_file, import_module
from neuron.ports.targets import find_target


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_file_can_import_what_lies_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "beside_of_first_port.py", "VALUE = 3\n")
    source = "from beside_of_first_port import VALUE\n\ndef build():\n    return VALUE\n"
    port = write(tmp_path / "port.py", source)
    assert import_file(port).find("build")() == 3


def test_what_lies_beside_the_file_comes_before_what_another_port_brought(tmp_path: Path) -> None:
    source = "def build():\n    import shared_name_of_ports\n    return shared_name_of_ports.VALUE\n"
    for name, value in (("first", 1), ("second", 2)):
        write(tmp_path / name / "shared_name_of_ports.py", f"VALUE = {value}\n")
        write(tmp_path / name / "port.py", source)
    import_file(tmp_path / "first" / "port.py")
    import_file(tmp_path / "second" / "port.py")
    assert import_file(tmp_path / "first" / "port.py").find("build")() == 1


def test_edit_within_a_second_is_seen(tmp_path: Path) -> None:
    values = []
    for number in (1, 2, 3):
        port = write(tmp_path / "port.py", f"def build():\n    return {number}\n")
        values.append(import_file(port).find("build")())
    assert values == [1, 2, 3]


def test_digest_is_that_of_the_source(tmp_path: Path) -> None:
    first = import_file(write(tmp_path / "a" / "port.py", "def build(): pass\n")).digest()
    same = import_file(write(tmp_path / "b" / "port.py", "def build(): pass\n")).digest()
    other = import_file(write(tmp_path / "c" / "port.py", "def build(): ...\n")).digest()
    assert first == same != other


def test_digest_covers_what_the_port_imports_from_its_own_folder(tmp_path: Path) -> None:
    write(tmp_path / "kernels_of_the_port" / "__init__.py", "")
    kernel = write(tmp_path / "kernels_of_the_port" / "attention.py", "SCALE = 1\n")
    port = write(tmp_path / "port.py", "import kernels_of_the_port.attention\n\ndef build(): pass\n")
    before = import_file(port).digest()
    kernel.write_text("SCALE = 2\n")
    after = import_file(port).digest()
    write(tmp_path / "unrelated.py", "SCALE = 3\n")
    assert before != after == import_file(port).digest()


def test_digest_covers_what_the_import_brings_in_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port's base class may lie in another folder of its package."""
    write(tmp_path / "ported" / "__init__.py", "")
    write(tmp_path / "ported" / "a" / "layer.py", "from ported.b.base import build\n")
    base = write(tmp_path / "ported" / "b" / "base.py", "def build(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)

    def digest() -> str:
        for name in [name for name in sys.modules if name.startswith("ported")]:
            monkeypatch.delitem(sys.modules, name)
        return import_module("ported.a.layer").digest()

    before = digest()
    base.write_text("def build(): return 'mended'\n")
    assert before != digest() == digest()


def test_digest_leaves_installed_libraries_out(tmp_path: Path) -> None:
    library = write(tmp_path / "venv" / "site-packages" / "library_of_the_port.py", "A = 1\n")
    source = f"import sys\nsys.path.insert(0, {str(library.parent)!r})\nimport library_of_the_port, json\n"
    port = write(tmp_path / "port.py", source + "def build(): pass\n")
    before = import_file(port).digest()
    library.write_text("A = 2\n")
    assert import_file(port).digest() == before


def test_second_import_has_the_digest_of_the_first(tmp_path: Path) -> None:
    """Python loads a module that the port imports once in a process; it is part of the source both times."""
    helper = write(tmp_path / "elsewhere" / "helper_of_the_port_loaded_once.py", "A = 1\n")
    source = f"import sys\nsys.path.insert(0, {str(helper.parent)!r})\nimport {helper.stem}\n"
    port = write(tmp_path / "home" / "port.py", source + "def build(): pass\n")
    first = import_file(port).digest()
    assert import_file(port).digest() == first
    helper.write_text("A = 2\n")
    assert import_file(port).digest() != first


def test_own_targets_have_digests_of_their_own() -> None:
    digests = [find_target(name).source_digest for name in ("builtin", "reference", "builtin")]
    assert digests[0] == digests[2] != digests[1]
    assert all(len(digest) == 64 for digest in digests)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"nosuch\.py, named by --target, does not exist\. Give --target"):
        import_file(tmp_path / "nosuch.py")
    with pytest.raises(TargetError, match=r"no_such_package\.port cannot be imported.*ModuleNotFoundError"):
        import_module("no_such_package.port")
    source = "from pathlib import Path\nLIMIT = 3\n\nclass DecoderLayer: ...\n\nclass Attention: ...\n"
    port = import_file(write(tmp_path / "port.py", source))
    with pytest.raises(TargetError, match=r"no 'Layer' to call: found the classes DecoderLayer, Attention\."):
        port.find("Layer")
    with pytest.raises(TargetError, match="no 'LIMIT' to call"):
        port.find("LIMIT")
