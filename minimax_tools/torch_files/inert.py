"""Inert pickles: a pickle's opcodes build plain values, and nothing that it names is imported or called.

Python's unpickler calls whatever a file names, and a list of exceptions is never complete. Here it is the
other way round: `pickletools` decodes the opcodes, this file's small stack machine carries them out, and a
class or function is no more than its name. A `Vocabulary` lists the few names that become values; every other
one stays an `InertRecord`.
"""

from __future__ import annotations

import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import IO, Any

Name = tuple[str, str]  # module, qualified name


# Mutable: a pickle first makes an object and fills it afterwards, and others may point at it by then.
@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class InertRecord:
    """What a pickle says of an object whose class is not known here.

    Args:
        module: Module of the class or function.
        name: Its qualified name; ends in `()` where the file called what a call had given.
        args: What it would have been called with; None where the file only names it.
        state: What would have become its attributes.
        items: What would have been appended to it, or its (key, value) pairs.
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
    """The names that become values; a builder gives NotImplemented where its object must stay inert.

    Args:
        constants: Values that a name alone stands for.
        builders: Make a value of the arguments of a call.
        state_builders: Make a value of a record and the state it is given.
        persistent_load: Makes a value of what the file refers to outside the pickle.
    """

    constants: Mapping[Name, Any] = field(default_factory=dict)
    builders: Mapping[Name, Callable[..., Any]] = field(default_factory=dict)
    state_builders: Mapping[Name, Callable[[InertRecord, Any], Any]] = field(default_factory=dict)
    persistent_load: Callable[[Any], Any]


def load_inert(file: IO[bytes], vocabulary: Vocabulary) -> Any:
    """The value of the next pickle in `file`, which is left just behind it.

    Raises:
        pickle.UnpicklingError: The opcodes make no sense.
        ValueError: The bytes are no opcodes, or end too early.
    """
    return _Machine(vocabulary).run(file)


class _Machine:
    """The stack, the marks on it and the memo of one pickle."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, file: IO[bytes]) -> Any:
        for opcode, argument, _ in pickletools.genops(file):
            if opcode.name in _LITERALS:
                self._stack.append(argument)
            elif opcode.name in _FRESH:
                self._stack.append(_FRESH[opcode.name]())
            elif opcode.name in _COLLECTED:
                self._stack.append(_COLLECTED[opcode.name](self.pop_marked()))
            elif opcode.name in _ACTIONS:
                _ACTIONS[opcode.name](self, argument)
            elif opcode.name not in _WITHOUT_EFFECT:
                raise pickle.UnpicklingError(f"opcode {opcode.name} needs buffers outside the pickle")
        return self.pop()

    def pop(self) -> Any:
        self.top()
        return self._stack.pop()

    def top(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise pickle.UnpicklingError("the stack is empty")
        return self._stack[-1]

    def pop_tuple(self, length: int) -> tuple[Any, ...]:
        return tuple(reversed([self.pop() for _ in range(length)]))

    def pop_marked(self) -> list[Any]:
        if not self._marks:
            raise pickle.UnpicklingError("there is no mark on the stack")
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def discard(self) -> None:
        # Pickle's POP takes a mark where that is what lies on top.
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self.pop()

    def put(self, index: int) -> None:
        self._memo[index] = self.top()

    def memoize(self) -> None:
        self.put(len(self._memo))

    def get(self, index: int) -> None:
        if index not in self._memo:
            raise pickle.UnpicklingError(f"memo {index} is empty")
        self.push(self._memo[index])

    def push_global(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise pickle.UnpicklingError("a global's name is no string")
        record = InertRecord(module=module, name=name)
        self.push(self._vocabulary.constants.get((module, name), record))

    def call(self, callee: Any, args: Any, keywords: Any = None) -> None:
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
            self.push(record)
            return
        builder = self._vocabulary.builders.get((record.module, record.name))
        self.push(record if builder is None else _built(record, builder, *args))

    def call_marked(self) -> None:
        items = self.pop_marked()
        if not items:
            raise pickle.UnpicklingError("a call names nothing")
        self.call(items[0], tuple(items[1:]))

    def instantiate(self, module: str, name: str) -> None:
        self.call(InertRecord(module=module, name=name), tuple(self.pop_marked()))

    def build(self) -> None:
        state, record = self.pop(), self.top()
        if not isinstance(record, InertRecord):
            return  # Attributes of plain values and tensors are dropped: they hold no numbers.
        record.state = state
        builder = self._vocabulary.state_builders.get((record.module, record.name))
        value = record if builder is None else _built(record, builder, record, state)
        if value is not record:
            self._stack[-1] = value
            self._memo = {index: value if kept is record else kept for index, kept in self._memo.items()}

    def add(self, values: list[Any]) -> None:
        target = self.top()
        if isinstance(target, InertRecord):
            target.items.extend(values)
        elif type(target) is list:
            target.extend(values)
        elif type(target) is set:
            target.update(map(hashable, values))
        else:
            raise pickle.UnpicklingError(f"{type(target).__name__} takes no items")

    def store(self, values: list[Any]) -> None:
        target, pairs = self.top(), _pairs(values)
        if isinstance(target, InertRecord):
            target.items.extend(pairs)
        elif type(target) in (dict, OrderedDict):
            target.update((hashable(key), value) for key, value in pairs)
        else:
            raise pickle.UnpicklingError(f"{type(target).__name__} takes no pairs")

    def refer(self, persistent_id: Any) -> None:
        self.push(self._vocabulary.persistent_load(persistent_id))


def hashable(value: Any) -> Any:
    """`value` where it can be a key safely; else an inert record that holds it.

    Hashing a tuple walks all of it, and one nested deep enough by its author ends the process or never ends.
    """
    flat = isinstance(value, tuple) and all(isinstance(item, _SCALARS) for item in value)
    return (
        value
        if flat or isinstance(value, _SCALARS)
        else InertRecord(module="builtins", name="key", args=(value,))
    )


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


def _dict_of(values: list[Any]) -> dict[Any, Any]:
    return {hashable(key): value for key, value in _pairs(values)}


def _frozenset_of(values: list[Any]) -> frozenset[Any]:
    return frozenset(map(hashable, values))


_SCALARS = (str, bytes, int, float, complex, type(None), InertRecord)

# Opcodes whose argument is the value.
_LITERALS = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    )
)

_WITHOUT_EFFECT = frozenset(("PROTO", "FRAME", "STOP", "READONLY_BUFFER"))

_FRESH: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "NONE": lambda: None,
        "NEWTRUE": lambda: True,
        "NEWFALSE": lambda: False,
        "EMPTY_TUPLE": tuple,
        "EMPTY_LIST": list,
        "EMPTY_DICT": dict,
        "EMPTY_SET": set,
    }
)

_COLLECTED: Mapping[str, Callable[[list[Any]], Any]] = MappingProxyType(
    {"TUPLE": tuple, "LIST": list, "DICT": _dict_of, "FROZENSET": _frozenset_of}
)

_ACTIONS: Mapping[str, Callable[[_Machine, Any], Any]] = MappingProxyType(
    {
        "TUPLE1": lambda machine, _: machine.push(machine.pop_tuple(1)),
        "TUPLE2": lambda machine, _: machine.push(machine.pop_tuple(2)),
        "TUPLE3": lambda machine, _: machine.push(machine.pop_tuple(3)),
        "MARK": lambda machine, _: machine.mark(),
        "POP": lambda machine, _: machine.discard(),
        "POP_MARK": lambda machine, _: machine.pop_marked(),
        "DUP": lambda machine, _: machine.push(machine.top()),
        "PUT": lambda machine, index: machine.put(index),
        "BINPUT": lambda machine, index: machine.put(index),
        "LONG_BINPUT": lambda machine, index: machine.put(index),
        "MEMOIZE": lambda machine, _: machine.memoize(),
        "GET": lambda machine, index: machine.get(index),
        "BINGET": lambda machine, index: machine.get(index),
        "LONG_BINGET": lambda machine, index: machine.get(index),
        "GLOBAL": lambda machine, name: machine.push_global(*name.split(" ", 1)),
        "STACK_GLOBAL": lambda machine, _: machine.push_global(*machine.pop_tuple(2)),
        # The process's own extension registry is not asked: a code is a name like any other.
        "EXT1": lambda machine, code: machine.push_global("copyreg", f"extension {code}"),
        "EXT2": lambda machine, code: machine.push_global("copyreg", f"extension {code}"),
        "EXT4": lambda machine, code: machine.push_global("copyreg", f"extension {code}"),
        "REDUCE": lambda machine, _: machine.call(*machine.pop_tuple(2)),
        "NEWOBJ": lambda machine, _: machine.call(*machine.pop_tuple(2)),
        "NEWOBJ_EX": lambda machine, _: machine.call(*machine.pop_tuple(3)),
        "INST": lambda machine, name: machine.instantiate(*name.split(" ", 1)),
        "OBJ": lambda machine, _: machine.call_marked(),
        "BUILD": lambda machine, _: machine.build(),
        "APPEND": lambda machine, _: machine.add([machine.pop()]),
        "APPENDS": lambda machine, _: machine.add(machine.pop_marked()),
        "ADDITEMS": lambda machine, _: machine.add(machine.pop_marked()),
        "SETITEM": lambda machine, _: machine.store(list(machine.pop_tuple(2))),
        "SETITEMS": lambda machine, _: machine.store(machine.pop_marked()),
        "PERSID": lambda machine, persistent_id: machine.refer(persistent_id),
        "BINPERSID": lambda machine, _: machine.refer(machine.pop()),
    }
)
