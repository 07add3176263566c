"""Inert pickles: a pickle's opcodes build plain values, and nothing that the pickle names is imported or called.

Python's unpickler calls whatever a file names, and a list of exceptions is never complete. Here every name becomes an
`InertRecord`. A `Vocabulary` lists the few names that become values.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar

Name = tuple[str, str]  # module, qualified name


# Mutable: a pickle first makes an object and fills it afterwards, and others may point at it by then.
@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class InertRecord:
    """An object whose class is not known here, as the pickle describes it.

    Args:
        module: Module of the class or function.
        name: Its qualified name. It ends in `()` where the file called the result of a call.
        args: Arguments of the call. None where the file only names the class or function.
        state: State that would have become the object's attributes.
        items: Items that would have been appended, or (key, value) pairs.
    """

    module: str
    name: str
    args: tuple[Any, ...] | None = None
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<inert {self.module}.{self.name}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The names that become values. A builder gives NotImplemented where its object must stay inert.

    Args:
        constants: Values that a name alone stands for.
        builders: Functions that make a value of the arguments of a call.
        state_builders: Functions that make a value of a record and the state it is given.
        persistent_load: Function that makes a value of a reference to something outside the pickle.
    """

    constants: Mapping[Name, Any] = field(default_factory=dict)
    builders: Mapping[Name, Callable[..., Any]] = field(default_factory=dict)
    state_builders: Mapping[Name, Callable[[InertRecord, Any], Any]] = field(default_factory=dict)
    persistent_load: Callable[[Any], Any]


def load_inert(file: IO[bytes], vocabulary: Vocabulary) -> Any:
    """Return the value of the next pickle in `file`, which is left just behind it.

    Raises:
        pickle.UnpicklingError: The opcodes make no sense, or end too early.
        ValueError: The bytes are no pickle's.
    """
    try:
        return _InertUnpickler(file, vocabulary).load()
    except (EOFError, LookupError) as error:
        raise pickle.UnpicklingError(f"the pickle is damaged: {type(error).__name__} {error}") from error


# Python's own unpickler in Python: the one in C takes no other action for an opcode.
class _InertUnpickler(pickle._Unpickler):
    """An unpickler that calls builders of its vocabulary and nothing else."""

    # Types of the base class, which typeshed does not list.
    stack: list[Any]
    memo: dict[int, Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: IO[bytes], vocabulary: Vocabulary) -> None:
        super().__init__(file, encoding="latin-1")
        self._vocabulary = vocabulary

    def find_class(self, module: str, name: str) -> Any:
        return self._vocabulary.constants.get((module, name), InertRecord(module=module, name=name))

    def persistent_load(self, persistent_id: Any) -> Any:
        return self._vocabulary.persistent_load(persistent_id)

    def get_extension(self, code: int) -> None:
        # The process's own extension registry is not asked: a code is a name like any other.
        self.append(self.find_class("copyreg", f"extension {code}"))

    def _instantiate(self, callee: Any, args: Any) -> None:
        self._call(callee, tuple(args))

    def _call(self, callee: Any, args: Any, keywords: Any = None) -> None:
        if not isinstance(args, tuple):
            raise pickle.UnpicklingError("a call's arguments are no tuple")
        if not isinstance(callee, InertRecord):
            kind = type(callee)
            record = InertRecord(module=kind.__module__, name=f"{kind.__qualname__}()", args=(callee, *args))
        elif callee.args is not None:
            record = InertRecord(module=callee.module, name=f"{callee.name}()", args=args)
        else:
            record = InertRecord(module=callee.module, name=callee.name, args=args)
        if keywords:
            record.args = (*args, keywords)
            self.append(record)
            return
        builder = self._vocabulary.builders.get((record.module, record.name))
        self.append(record if builder is None else _built(record, builder, *args))

    def _load_call(self) -> None:
        args = self.stack.pop()
        self._call(self.stack.pop(), args)

    def _load_call_with_keywords(self) -> None:
        keywords, args = self.stack.pop(), self.stack.pop()
        self._call(self.stack.pop(), args, keywords)

    def _load_state(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if not isinstance(record, InertRecord):
            return  # Attributes of plain values and tensors are dropped: they hold no numbers.
        record.state = state
        builder = self._vocabulary.state_builders.get((record.module, record.name))
        value = record if builder is None else _built(record, builder, record, state)
        if value is not record:
            self.stack[-1] = value
            self.memo = {index: value if kept is record else kept for index, kept in self.memo.items()}

    def _load_item(self) -> None:
        self._add([self.stack.pop()])

    def _load_items(self) -> None:
        self._add(self.pop_mark())

    def _add(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, InertRecord):
            target.items.extend(values)
        elif type(target) is list:
            target.extend(values)
        elif type(target) is set:
            target.update(map(hashable, values))
        else:
            raise pickle.UnpicklingError(f"{type(target).__name__} takes no items")

    def _load_pair(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._store([key, value])

    def _load_pairs(self) -> None:
        self._store(self.pop_mark())

    def _store(self, values: list[Any]) -> None:
        target, pairs = self.stack[-1], _pairs(values)
        if isinstance(target, InertRecord):
            target.items.extend(pairs)
        elif type(target) in (dict, OrderedDict):
            target.update((hashable(key), value) for key, value in pairs)
        else:
            raise pickle.UnpicklingError(f"{type(target).__name__} takes no pairs")

    def _load_dict(self) -> None:
        pairs = _pairs(self.pop_mark())  # Before `append` is looked up: it is another list's behind the mark.
        self.append({hashable(key): value for key, value in pairs})

    def _load_frozenset(self) -> None:
        items = self.pop_mark()
        self.append(frozenset(map(hashable, items)))

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.REDUCE[0]: _load_call,
        pickle.NEWOBJ[0]: _load_call,
        pickle.NEWOBJ_EX[0]: _load_call_with_keywords,
        pickle.BUILD[0]: _load_state,
        pickle.APPEND[0]: _load_item,
        pickle.APPENDS[0]: _load_items,
        pickle.ADDITEMS[0]: _load_items,
        pickle.SETITEM[0]: _load_pair,
        pickle.SETITEMS[0]: _load_pairs,
        pickle.DICT[0]: _load_dict,
        pickle.FROZENSET[0]: _load_frozenset,
    }


def hashable(value: Any) -> Any:
    """Return `value` where it can be a key safely, else an inert record that holds it.

    Hashing a tuple walks all of it, and one nested deep enough by its author ends the process or never ends.
    """
    flat = isinstance(value, tuple) and all(isinstance(item, _SCALARS) for item in value)
    if flat or isinstance(value, _SCALARS):
        return value
    return InertRecord(module="builtins", name="key", args=(value,))


def _built(record: InertRecord, builder: Callable[..., Any], *args: Any) -> Any:
    try:
        value = builder(*args)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise pickle.UnpicklingError(f"{record.module}.{record.name}: {error}") from error
    return record if value is NotImplemented else value


def _pairs(values: list[Any]) -> list[tuple[Any, Any]]:
    if len(values) % 2:
        raise pickle.UnpicklingError("a key has no value")
    return list(zip(values[::2], values[1::2], strict=True))


_SCALARS = (str, bytes, int, float, complex, type(None), InertRecord)
