"""Inert pickles: a pickle's opcodes build plain values, and nothing that the pickle names is imported or called.

Python's unpickler calls any name in a file, and a list of forbidden names is never complete. Here each name becomes an
`InertRecord`, except for the few names of a `Vocabulary`, which become values.
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
    """An object of an unknown class, as the pickle describes it.

    Args:
        module: Module of the class or function.
        name: Qualified name. It ends in `()` if the file calls the result of a call.
        args: Arguments of the call; None if the file only names the class or function.
        state: State that the pickle gives the object, as attributes for example.
        items: Items that the pickle appends, or (key, value) pairs.
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
    """Names that become values. A builder returns NotImplemented if its object must stay inert.

    Args:
        constants: Values of names.
        builders: Functions that turn the arguments of a call into a value.
        state_builders: Functions that turn a record and its state into a value.
        persistent_load: Function that turns a reference to data outside the pickle into a value.
    """

    constants: Mapping[Name, Any] = field(default_factory=dict)
    builders: Mapping[Name, Callable[..., Any]] = field(default_factory=dict)
    state_builders: Mapping[Name, Callable[[InertRecord, Any], Any]] = field(default_factory=dict)
    persistent_load: Callable[[Any], Any]


def load_inert(file: IO[bytes], vocabulary: Vocabulary) -> Any:
    """Read the next pickle in `file`, and return its value; the file is then just after the pickle.

    Raises:
        pickle.UnpicklingError: The opcodes contradict each other, or end too early.
        ValueError: The bytes are not a pickle.
    """
    try:
        return _InertUnpickler(file, vocabulary).load()
    except (EOFError, LookupError) as error:
        raise pickle.UnpicklingError(f"the pickle is damaged: {type(error).__name__} {error}") from error


# The unpickler in Python: the one in C cannot be given other actions for opcodes.
class _InertUnpickler(pickle._Unpickler):
    """An unpickler that calls builders of its vocabulary and nothing else."""

    # Attributes of the base class that typeshed does not list.
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
        # A code of the extension registry is a name like any other.
        self.append(self.find_class("copyreg", f"extension {code}"))

    def _instantiate(self, callee: Any, args: Any) -> None:
        self._call(callee, tuple(args))

    def _call(self, callee: Any, args: Any, keywords: Any = None) -> None:
        if not isinstance(args, tuple):
            raise pickle.UnpicklingError("a call's arguments are not a tuple")
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
            return  # Attributes of plain values and tensors are dropped.
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
        pairs = _pairs(self.pop_mark())  # First, because it replaces `append`.
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
    """Return `value` if it can be a key safely, else an inert record that holds it.

    A deeply nested tuple could crash the process when it is hashed, or take forever.
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
