"""Import and digest of the Python file or module that holds a port; `ImportedPort` is what a name in it stands for."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from minimax_tools.errors import TargetError, UsageError, did_you_mean
from minimax_tools.machine.native_output import output_set_aside
from minimax_tools.provenance import digest_sources
from minimax_tools.torch_file import find_pickled_module
from neuron.ports.target import Port
from neuron.process.status import doing

if TYPE_CHECKING:
    from typing_extensions import Self

# Attribute of the port's class or module: options of the device's config, such as NxDI's.
OPTIONS = "mm2_neuron_config"

# Modules that are no part of a port: the standard library, mm2, and what is installed.
_LIBRARIES = sys.stdlib_module_names | {
    "compare",
    "gpu_reference",
    "minimax_tools",
    "mm2",
    "neuron",
    "reports",
}
_INSTALLATION_FOLDERS = frozenset({"site-packages", "dist-packages"})
# Modules that each place has imported in this process: Python loads them once, and they belong to its source each time.
_IMPORTED_BY: dict[str, frozenset[str]] = {}


@dataclass(frozen=True, kw_only=True)
class ImportedPort(Port):
    """A class or function of a file or module, `PATH.py:NAME` or `package.module:NAME`."""

    # Beginning of a --target of this kind.
    prefix: ClassVar[str] = ""

    factory: Callable[..., Any]
    module: ModuleType | None = None  # the module that was imported; None for a factory given in Python

    def __post_init__(self) -> None:
        if self.build_dtype is not None and not isinstance(self.build_dtype, torch.dtype):
            raise TargetError(
                f"port {self.name}: build_dtype is no dtype",
                expected="a torch.dtype, such as torch.float32",
                found=repr(self.build_dtype),
            )

    @classmethod
    def find(cls, name: str) -> Self | None:
        """Import the port's file or module; None if the name has another form."""
        if not name.startswith(cls.prefix):
            return None
        cls.require_library()
        found = import_callable(name.removeprefix(cls.prefix))
        if found is not None:
            source, factory = found
            return cls(name=name, factory=factory, module=source.module, source_digest=source.digest())
        if cls.prefix:
            raise UsageError(f"--target {name!r} is unknown", expected=cls.forms)
        return None

    @classmethod
    def require_library(cls) -> None:
        """Raise TargetError unless the library that ports of this kind are built on can be imported."""

    @property
    def build_dtype(self) -> torch.dtype | None:
        """The default dtype under which the port wants its module built; None for the run's."""
        dtype: torch.dtype | None = getattr(self.factory, "build_dtype", None)
        return dtype

    @property
    def port_config(self) -> Mapping[str, Any]:
        """The port's options for the device: those of its module, then those of its class."""
        options: dict[str, Any] = {}
        for owner in (self.module or inspect.getmodule(self.factory), self.factory):
            declared = getattr(owner, OPTIONS, {})
            if not isinstance(declared, Mapping):
                raise TargetError(
                    f"{OPTIONS} of {getattr(owner, '__name__', owner)} cannot be read",
                    expected="a dict of options",
                    found=type(declared).__name__,
                )
            options |= declared
        return options

    def _conversion(self, module: nn.Module) -> Any:
        # A function may build a class that its author cannot change.
        return super()._conversion(module) or getattr(self.factory, "convert_state_dict", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSource:
    """An imported module that holds a port, its path or dotted name, and the modules that were loaded with it."""

    place: str
    module: ModuleType
    imported: frozenset[str] = frozenset()

    def find(self, name: str) -> Callable[..., Any]:
        """Return the class or function of a name.

        Raises:
            TargetError: The module has no such name, or it cannot be called.
        """
        attribute: object = getattr(self.module, name, None)
        if callable(attribute):
            return attribute
        classes = [
            key
            for key, value in vars(self.module).items()
            if inspect.isclass(value) and value.__module__ == self.module.__name__
        ]
        raise TargetError(
            f"{self.place} has no {name!r} to call",
            found=f"the classes {', '.join(classes)}" if classes else "no class",
            next_step=did_you_mean(name, classes)
            or f"Give --target {self.place}:NAME with a NAME that it has.",
        )

    def digest(self) -> str:
        """Compute sha256 over the module's file, loaded modules below its folder, and modules that it imported.

        Of modules from elsewhere, installed libraries and mm2 are left out. Empty for a module without a file.
        """
        file = getattr(self.module, "__file__", None)
        if file is None:
            return ""
        folder = Path(file).parent
        files = {path.relative_to(folder).as_posix(): path for path in _loaded_files_beneath(folder)}
        files |= _module_files(self.imported)
        files[Path(file).name] = Path(file)
        return digest_sources(files)


def import_callable(name: str) -> tuple[TargetSource, Callable[..., Any]] | None:
    """Import what `PATH.py:NAME` or `package.module:NAME` names, with its source; None for other forms.

    Raises:
        TargetError: The file, the module or the name in it does not exist or cannot be imported.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        return None
    if not place.endswith(".py"):
        _refuse_pickle(Path(place))
    source = import_file(Path(place)) if place.endswith(".py") else import_module(place)
    return source, source.find(attribute)


def _refuse_pickle(path: Path) -> None:
    """Raise TargetError if a file that is named as a port holds a module that was pickled whole."""
    if not path.is_file():
        return
    pickled = find_pickled_module(path)
    if pickled is not None:
        raise TargetError(
            f"{path}, named by --target, is not a Python file",
            expected="PATH.py:NAME, the source of the port",
            found=f"a pickled module of the class {pickled}",
            next_step=f"Name the file that defines that class, as in port.py:{pickled.rpartition('.')[2]}.",
        )


def import_file(path: Path) -> TargetSource:
    """Execute a Python file as a new module; like a script, it can import files beside it.

    Raises:
        TargetError: The file does not exist, or raised.
    """
    if not path.is_file():
        raise TargetError(
            f"{path}, named by --target, does not exist",
            next_step="Give --target PATH.py:NAME with its path.",
        )
    _refuse_pickle(path)
    folder = str(path.resolve().parent)
    # First in the search path, as for a script: another folder there may hold a file of the same name.
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    module = ModuleType(f"mm2_target_{path.stem}")
    module.__file__ = str(path.resolve())
    sys.modules[module.__name__] = module

    def execute() -> ModuleType:
        # Not through Python's cache, which misses an edit within one second.
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
        return module

    return _import_with(execute, place=str(path))


def import_module(name: str) -> TargetSource:
    """Import a module by its dotted name.

    Raises:
        TargetError: It cannot be found, or raised.
    """
    return _import_with(lambda: importlib.import_module(name), place=name)


def _import_with(load: Callable[[], ModuleType], *, place: str) -> TargetSource:
    loaded_before = set(sys.modules)
    try:
        with output_set_aside(), doing(f"importing port {place}"):
            module = load()
    except (Exception, SystemExit) as error:  # any error of the port's code
        raise TargetError(
            f"port {place} cannot be imported",
            found=f"{type(error).__name__}: {error}",
            next_step="See --debug for the traceback; a module must be installed or on PYTHONPATH.",
        ) from error
    imported = _IMPORTED_BY.get(place, frozenset()) | (frozenset(sys.modules) - loaded_before)
    _IMPORTED_BY[place] = imported
    return TargetSource(place=place, module=module, imported=imported)


def _module_files(names: Iterable[str]) -> dict[str, Path]:
    """Return the source files of loaded modules by module name, without libraries and mm2."""
    files = {}
    for name in names:
        file = _source_file(name)
        if file is None or name.partition(".")[0] in _LIBRARIES:
            continue
        if not _INSTALLATION_FOLDERS & set(file.parts) and file.is_file():
            files[name] = file
    return files


def _loaded_files_beneath(folder: Path) -> set[Path]:
    """Return the source files of loaded modules in a folder, without libraries installed there."""
    files = set()
    for name, module in tuple(sys.modules.items()):
        # Thousands of modules lie elsewhere: their paths are not parsed.
        if folder.name not in str(getattr(module, "__file__", "")):
            continue
        file = _source_file(name)
        is_standard = name.partition(".")[0] in sys.stdlib_module_names
        if file is None or is_standard or not file.is_relative_to(folder):
            continue
        # The folder itself may lie in an installation.
        if not _INSTALLATION_FOLDERS & set(file.relative_to(folder).parts) and file.is_file():
            files.add(file)
    return files


def _source_file(module_name: str) -> Path | None:
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return Path(file) if isinstance(file, str) and file.endswith(".py") else None
