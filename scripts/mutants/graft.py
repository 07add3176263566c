"""Graft: put a mutant into the running process, where its module has been imported long ago.

The changed file is executed once more beside its module. What its one changed statement defines then takes the old
one's place: functions get other code and defaults, so whoever holds them runs the mutant. A constant is replaced in
each module that holds it under its name.
"""

from __future__ import annotations

import ast
import enum
import functools
import gc
import inspect
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import click
import numba


class NotGraftedError(Exception):
    """The change cannot be put into a running process, or is none."""


def graft(path: Path, before: str, after: str) -> None:
    """Put the changed file into all modules that were imported from `path`.

    Raises:
        NotGraftedError: The changed file cannot be imported, or nothing that tests could call has changed.
    """
    modules = [module for module in list(sys.modules.values()) if _file_of(module) == path]
    name = _changed_name(before, after)
    for module in modules:
        _replace(module, name, _execute(module, path, after))
    if not modules:
        raise NotGraftedError("no test imports it")


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file) if file else None


def _changed_name(before: str, after: str) -> str:
    """Return the name that the changed statement of the module defines."""
    trees = [ast.parse(text).body for text in (before, after)]
    for old, new in zip(*trees, strict=True):
        if ast.dump(old) == ast.dump(new):
            continue
        if isinstance(new, (ast.FunctionDef, ast.ClassDef)):
            return new.name
        target = new.targets[0] if isinstance(new, ast.Assign) else getattr(new, "target", None)
        if isinstance(target, ast.Tuple):
            values = (getattr(statement.value, "elts", ()) for statement in (old, new))
            target = next(
                name
                for name, *pair in zip(target.elts, *values, strict=True)
                if len({*map(ast.dump, pair)}) > 1
            )
        if isinstance(target, ast.Name):
            return target.id
        raise NotGraftedError("a statement that defines no name")
    raise NotGraftedError("the same program")


def _execute(module: ModuleType, path: Path, text: str) -> dict[str, Any]:
    """Execute the changed file beside its module."""
    namespace: dict[str, Any] = {
        key: value for key, value in vars(module).items() if key.startswith("__") and key != "__annotations__"
    }
    try:
        exec(compile(text, str(path), "exec"), namespace)
    except Exception as error:
        raise NotGraftedError(f"its import raises {type(error).__name__}") from error
    return namespace


def _replace(module: ModuleType, name: str, namespace: dict[str, Any]) -> None:
    """Give what a module calls `name` the code and the values of the changed one."""
    old, new = vars(module)[name], namespace[name]
    old_functions, new_functions = dict(_functions(old)), dict(_functions(new))
    if old_functions.keys() != new_functions.keys():
        raise NotGraftedError("it has other functions")
    changes = [_replace_function(old_functions[key], new_functions[key]) for key in old_functions]
    if isinstance(old, type):
        changes += [_replace_attribute(old, key, value) for key, value in vars(new).items()]
    elif not old_functions:
        changes += [_replace_constant(holder, name, old, new) for holder in list(sys.modules.values())]
    if not any(changes):
        raise NotGraftedError("it only matters when its module is imported")
    _compile_anew(old)


def _functions(value: object, name: str = "") -> Iterator[tuple[str, FunctionType]]:
    """Yield every function of a function, a command or a class, behind whatever is wrapped around it."""
    if isinstance(value, type) and not name:
        for key, member in vars(value).items():
            yield from _functions(member, key)
    elif isinstance(value, property):
        for part in ("fget", "fset"):
            yield from _functions(getattr(value, part), f"{name}.{part}")
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _functions(value.__func__, name)
    elif isinstance(value, functools.cached_property):
        yield from _functions(value.func, name)
    elif isinstance(value, click.Command):
        yield from _functions(value.callback, name)
    elif callable(value) and isinstance(inner := inspect.unwrap(value), FunctionType):
        yield name, inner


def _replace_function(old: FunctionType, new: FunctionType) -> bool:
    """Give a function the code and the defaults of the new one; return whether it had others."""
    changed = old.__code__ != new.__code__
    if changed:
        if len(old.__code__.co_freevars) != len(new.__code__.co_freevars):
            raise NotGraftedError("it is a closure over other variables")
        old.__code__ = new.__code__
    if repr(old.__defaults__) != repr(new.__defaults__):
        old.__defaults__, changed = new.__defaults__, True
    if repr(old.__kwdefaults__) != repr(new.__kwdefaults__):
        # The defaults that did not change stay the very same: they may be members of an enumeration.
        kept, others = old.__kwdefaults__ or {}, new.__kwdefaults__ or {}
        old.__kwdefaults__ = {
            key: kept[key] if key in kept and repr(kept[key]) == repr(value) else value
            for key, value in others.items()
        }
        changed = True
    return changed


def _replace_attribute(old: type, key: str, value: object) -> bool:
    """Give a class a plain value of the new one; return whether it had another."""
    if key.startswith("_") or callable(value) or hasattr(value, "__get__") or isinstance(old, enum.EnumMeta):
        return False
    if key not in vars(old) or repr(vars(old)[key]) == repr(value):
        return False
    setattr(old, key, value)
    return True


def _replace_constant(holder: ModuleType, name: str, old: object, new: object) -> bool:
    if vars(holder).get(name, holder) is not old:
        return False
    setattr(holder, name, new)
    return True


def _compile_anew(function: object) -> None:
    """Have a compiled loop compiled again: its wrapper holds the machine code in a closure."""
    wrapper = function
    while isinstance(wrapper, FunctionType):
        for variable, cell in zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True):
            if variable == "machine_code":
                cell.cell_contents = None
                # numba's cache on disk tells functions apart by their bytecode, which holds no constants.
                numba.config.CACHE_DIR = tempfile.mkdtemp(prefix="mutant-")
        wrapper = getattr(wrapper, "__wrapped__", None)


def find_caches() -> list[functools._lru_cache_wrapper[Any]]:
    """Return the caches of all functions but those of libraries: they remember what the unchanged program gave."""
    # The tests freeze what they have imported, and so hide it.
    gc.unfreeze()
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    caches = []
    for value in gc.get_objects():
        # Not isinstance: it asks the object for its class, and lazy ones do something then.
        if type(value) is functools._lru_cache_wrapper:
            inner = inspect.unwrap(value)
            if isinstance(inner, FunctionType) and not inner.__code__.co_filename.startswith(libraries):
                caches.append(value)
    return caches
