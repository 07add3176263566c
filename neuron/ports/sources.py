"""Import and digest of the Python file or module that holds a port."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from minimax_tools.errors import TargetError
from minimax_tools.machine.native_output import output_set_aside
from neuron.process.status import doing

# The standard library and mm2 are no part of a port.
_LIBRARIES = sys.stdlib_module_names | {"compare", "gpu_reference", "minimax_tools", "neuron", "reports"}
_FOREIGN_FOLDERS = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSource:
    """An imported module that holds a port.

    Args:
        place: Path or dotted name, as the user wrote it.
        imported: Names of the modules that it imported.
    """

    place: str
    module: ModuleType
    imported: frozenset[str] = frozenset()

    def find(self, name: str) -> Callable[..., Any]:
        """Return the class or function of a name.

        Raises:
            TargetError: The module has no such name, or it cannot be called.
        """
        found: object = getattr(self.module, name, None)
        if callable(found):
            return found
        own = [
            key
            for key, value in vars(self.module).items()
            if inspect.isclass(value) and value.__module__ == self.module.__name__
        ]
        raise TargetError(
            f"{self.place} has no {name!r} to call",
            found=f"the classes {', '.join(own)}" if own else "no class",
            next_step=f"Give --target {self.place}:NAME with a NAME that it has.",
        )

    def digest(self) -> str:
        """Compute sha256 over the module's file, loaded modules below its folder, and modules that it imported.

        Installed libraries and mm2 are left out. Empty for a module without a file.
        """
        file = getattr(self.module, "__file__", None)
        if file is None:
            return ""
        folder = Path(file).parent
        named = {path.relative_to(folder).as_posix(): path for path in _loaded_files_beneath(folder)}
        named |= _port_files(self.imported)
        named[Path(file).name] = Path(file)
        digest = hashlib.sha256()
        for name, path in sorted(named.items()):
            content = path.read_bytes()
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()


def import_callable(name: str) -> tuple[TargetSource, Callable[..., Any]] | None:
    """Import what `PATH.py:NAME` or `package.module:NAME` names, with its source; None for other forms.

    Raises:
        TargetError: The file, the module or the name in it does not exist or cannot be imported.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        return None
    source = import_file(Path(place)) if place.endswith(".py") else import_module(place)
    return source, source.find(attribute)


def import_file(path: Path) -> TargetSource:
    """Execute a Python file as a new module; like a script, it can import files beside it.

    Raises:
        TargetError: The file does not exist, or raised.
    """
    if not path.is_file():
        raise TargetError(
            f"target file {path} does not exist", next_step="Give --target PATH.py:NAME with its path."
        )
    folder = str(path.resolve().parent)
    # First in the path, as for a script: a folder added since may hold a file of the same name.
    sys.path[:] = [folder, *(path for path in sys.path if path != folder)]
    module = ModuleType(f"mm2_target_{path.stem}")
    module.__file__ = str(path.resolve())
    sys.modules[module.__name__] = module

    def execute() -> ModuleType:
        # Not through Python's cache, which misses an edit within one second.
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
        return module

    return _imported(str(path), execute)


def import_module(name: str) -> TargetSource:
    """Import a module by its dotted name.

    Raises:
        TargetError: It cannot be found, or raised.
    """
    return _imported(name, lambda: importlib.import_module(name))


def _imported(place: str, load: Callable[[], ModuleType]) -> TargetSource:
    before = set(sys.modules)
    try:
        with output_set_aside(), doing(f"importing target {place}"):
            module = load()
    except (Exception, SystemExit) as error:  # any error of the port's code
        raise TargetError(
            f"target {place} cannot be imported",
            found=f"{type(error).__name__}: {error}",
            next_step="See --debug for the traceback; a module must be installed or on PYTHONPATH.",
        ) from error
    return TargetSource(place=place, module=module, imported=frozenset(sys.modules) - before)


def _port_files(names: Iterable[str]) -> dict[str, Path]:
    """Return the source files of modules by name, without libraries and mm2."""
    files = {}
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        is_library = name.partition(".")[0] in _LIBRARIES
        if not is_library and isinstance(file, str) and not _FOREIGN_FOLDERS & set(Path(file).parts):
            files[name] = Path(file)
    return {name: file for name, file in files.items() if file.suffix == ".py" and file.is_file()}


def _loaded_files_beneath(folder: Path) -> set[Path]:
    """Return the source files of loaded modules in a folder, without libraries installed there."""
    start = f"{folder}{os.sep}"
    files = [
        Path(file)
        for name, module in tuple(sys.modules.items())
        if isinstance(file := getattr(module, "__file__", None), str)
        and file.startswith(start)
        and name.partition(".")[0] not in sys.stdlib_module_names
    ]
    return {
        file
        for file in files
        if file.suffix == ".py"
        and not _FOREIGN_FOLDERS & set(file.relative_to(folder).parts)
        and file.is_file()
    }
