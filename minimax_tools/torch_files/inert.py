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

# Containers that may be open at once. Python's own pickler stops near 1 000, its limit of recursion.
_MAX_DEPTH = 10_000


# Mutable: a pickle first makes an object and fills it afterwards, and others may point at it by then.
@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class InertRecord:
    """An object of an unknown class, as the pickle describes it."""

    module: str  # module of the class or function
    name: str  # qualified name; with `()` at its end for the call of an object, such as another call's result
    args: tuple[Any, ...] | None = None  # arguments of the call; None if the file only names it
    state: Any = None  # state that the pickle gives the object, as attributes for example
    items: list[Any] = field(default_factory=list)  # items that the pickle appends, or (key, value) pairs

    def __repr__(self) -> str:
        return f"<inert {self.module}.{self.name}>"


# Types whose values are hashed at once.
_SCALARS = (str, bytes, int, float, complex, type(None), InertRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Names that become values. A builder returns NotImplemented if its object must stay inert."""

    constants: Mapping[Name, Any] = field(default_factory=dict)
    # By the name called: from the arguments of the call to a value.
    builders: Mapping[Name, Callable[..., Any]] = field(default_factory=dict)
    # By a record's name: from the record and its state to a value.
    state_builders: Mapping[Name, Callable[[InertRecord, Any], Any]] = field(default_factory=dict)
    # From a reference to data outside the pickle, such as a tensor's storage, to a value.
    persistent_load: Callable[[Any], Any]


def load_inert(file: IO[bytes], vocabulary: Vocabulary) -> Any:
    """Read the next pickle in `file`, and return its value; the file is then just after the pickle.

    Raises:
        pickle.UnpicklingError: The opcodes contradict each other, end too early, or nest too deeply.
        ValueError: The bytes are not a pickle.
    """
    try:
        return _InertUnpickler(file, vocabulary).load()
    except (EOFError, LookupError) as error:
        raise pickle.UnpicklingError(f"the pickle is damaged: {type(error).__name__} {error}") from error


# The unpickler in Python: the one in C cannot be given other actions for opcodes.
class _InertUnpickler(pickle._Unpickler):
    """An unpickler that calls builders of its vocabulary and nothing else.

    The base class keeps a `stack` of values and acts on it for each opcode, by the table `dispatch` (at the end). The
    actions that would call something, or fill an object in, are replaced here. `memo` holds values used again.
    """

    # Attributes of the base class that typeshed does not list.
    stack: list[Any]
    memo: dict[int, Any]
    metastack: list[list[Any]]
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
        # The base class acts on the opcodes INST and OBJ, and calls this at the end.
        self._call(callee, tuple(args))

    def _call(self, callee: Any, args: Any, keywords: Any = None) -> None:
        """Put the value of a call on the stack: what the vocabulary builds, else an inert record."""
        if not isinstance(args, tuple):
            raise pickle.UnpicklingError("a call's arguments are not a tuple")
        if not isinstance(callee, InertRecord):
            # A value that the vocabulary built is called.
            kind = type(callee)
            record = InertRecord(module=kind.__module__, name=f"{kind.__qualname__}()", args=(callee, *args))
        elif callee.args is not None:
            # The result of a call is called.
            record = InertRecord(module=callee.module, name=f"{callee.name}()", args=args)
        else:
            record = InertRecord(module=callee.module, name=callee.name, args=args)
        if keywords:
            record.args = (*args, keywords)
            self.append(record)
            return
        builder = self._vocabulary.builders.get((record.module, record.name))
        self.append(record if builder is None else _build(record, builder, *args))

    def _load_mark(self) -> None:
        if len(self.metastack) >= _MAX_DEPTH:
            raise pickle.UnpicklingError(f"the pickle nests more than {_MAX_DEPTH} deep")
        super().load_mark()  # type: ignore[misc]  # typeshed does not list it

    def _load_call(self) -> None:
        args = self.stack.pop()
        self._call(self.stack.pop(), args)

    def _load_call_with_keywords(self) -> None:
        keywords, args = self.stack.pop(), self.stack.pop()
        self._call(self.stack.pop(), args, keywords)

    def _load_state(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if not isinstance(record, InertRecord):
            # Attributes of plain values and tensors are dropped.
            return
        record.state = state
        builder = self._vocabulary.state_builders.get((record.module, record.name))
        value = record if builder is None else _build(record, builder, record, state)
        if value is not record:
            self.stack[-1] = value
            # Later references to the object must give the value.
            self.memo = {index: value if kept is record else kept for index, kept in self.memo.items()}

    def _add_items(self, values: list[Any]) -> None:
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
        self._add_pairs([key, value])

    def _add_pairs(self, values: list[Any]) -> None:
        target, pairs = self.stack[-1], _pairs(values)
        if isinstance(target, InertRecord):
            target.items.extend(pairs)
        elif type(target) in (dict, OrderedDict):
            target.update((hashable(key), value) for key, value in pairs)
        else:
            raise pickle.UnpicklingError(f"{type(target).__name__} takes no pairs")

    def _load_dict(self) -> None:
        # `pop_mark` returns the values since the last mark. It also replaces `self.append`, so it must come first.
        pairs = _pairs(self.pop_mark())
        self.append({hashable(key): value for key, value in pairs})

    def _load_frozenset(self) -> None:
        items = self.pop_mark()
        self.append(frozenset(map(hashable, items)))

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.MARK[0]: _load_mark,
        pickle.REDUCE[0]: _load_call,
        pickle.NEWOBJ[0]: _load_call,
        pickle.NEWOBJ_EX[0]: _load_call_with_keywords,
        pickle.BUILD[0]: _load_state,
        pickle.APPEND[0]: lambda self: self._add_items([self.stack.pop()]),
        pickle.APPENDS[0]: lambda self: self._add_items(self.pop_mark()),
        pickle.ADDITEMS[0]: lambda self: self._add_items(self.pop_mark()),
        pickle.SETITEM[0]: _load_pair,
        pickle.SETITEMS[0]: lambda self: self._add_pairs(self.pop_mark()),
        pickle.DICT[0]: _load_dict,
        pickle.FROZENSET[0]: _load_frozenset,
    }


def hashable(value: Any) -> Any:
    """Return `value` if it can be a key safely, else an inert record that holds it.

    A deeply nested tuple could crash the process when it is hashed, or take forever.
    """
    is_flat = isinstance(value, tuple) and all(isinstance(item, _SCALARS) for item in value)
    if is_flat or isinstance(value, _SCALARS):
        return value
    return InertRecord(module="builtins", name="key", args=(value,))


def word_kind(value: Any) -> str:
    """Name the kind of a value that a pickle held, as "list of length 3".

    Its content is not shown: lists that hold each other have texts without end, and deep ones end in a RecursionError.
    """
    if isinstance(value, InertRecord):
        return f"object of {value.module}.{value.name}"
    kind = type(value).__name__
    return (
        f"{kind} of length {len(value)}" if isinstance(value, list | tuple | set | frozenset | dict) else kind
    )


def _build(record: InertRecord, builder: Callable[..., Any], *args: Any) -> Any:
    """Return the builder's value, or the record if that must stay inert."""
    try:
        value = builder(*args)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise pickle.UnpicklingError(f"{record.module}.{record.name}: {error}") from error
    return record if value is NotImplemented else value


def _pairs(values: list[Any]) -> list[tuple[Any, Any]]:
    """Pair keys and values, which alternate."""
    if len(values) % 2:
        raise pickle.UnpicklingError("a key has no value")
    return list(zip(values[::2], values[1::2], strict=True))
