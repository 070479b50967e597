"""Reads pickles as data: no name in them is imported, looked up or called.

An interpreter of the opcodes with which Python writes plain values in protocols 2 to 5. A name is
looked up in a table of exact (module, name) pairs, in which a `Maker` stands for a class or a
function and makes a value of plain arguments. All other names and opcodes are refused.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

PROTOCOLS = range(2, 6)
# Types that hash without looking into anything.
FLAT = frozenset({str, int, float, bool, bytes, type(None)})
_SIZED = frozenset({str, bytes, tuple, list, dict, set})


class PickleError(ValueError):
    """A pickle contains more than data, or is damaged."""


class Maker(NamedTuple):
    """Stands for a named class or function."""

    name: str
    make: Callable[..., Any]


class Table(NamedTuple):
    """The names that pickles of one kind may use, and how objects get their state."""

    names: Mapping[tuple[str, str], Any]  # a Maker, or a value
    build: Mapping[type, Callable[[Any, Any], None]]
    keys: frozenset[type] = frozenset()  # of dicts, beside flat ones and tuples of these


def read_pickle(data: bytes, table: Table, persistent: Callable[[Any], Any] | None = None) -> Any:
    """Read the value of a pickle; `persistent` resolves references to storages.

    Raises:
        PickleError: Nothing of it has been run.
    """
    machine = _Machine(data, table, persistent)
    try:
        return machine.run()
    except PickleError:
        raise
    except Exception as error:  # what is damaged can end anywhere
        raise PickleError(
            f"it is damaged at byte {machine.at} ({type(error).__name__}: {str(error)[:100]})"
        ) from None


def checked_key(key: Any, keys: frozenset[type] = frozenset()) -> Any:
    """A dict key whose hash needs no recursion, however deeply a pickle nests."""
    kind = type(key)
    if kind in FLAT or kind in keys:
        return key
    if kind is tuple and all(type(entry) in FLAT for entry in key):
        return key
    raise PickleError(f"it has a {kind.__name__} as the key of a dict or an element of a set")


def whole_number(value: Any, what: str = "a number") -> int:
    """Check a size, offset or count of a tensor."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise PickleError(f"it has {value!r:.40} for {what}")
    return value


class _Machine:
    """The interpreter: its stack, its memo and its position in the data."""

    def __init__(self, data: bytes, table: Table, persistent: Callable[[Any], Any] | None) -> None:
        self.at = 0
        self._data, self._table, self._persistent = data, table, persistent
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # what is under each mark
        self._memo: dict[int, Any] = {}
        # Arguments may be used again and again: what is made of them stays linear in the file.
        self._left = 16 * len(data)

    def run(self) -> Any:
        data, actions = self._data, _ACTIONS
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                if self._below or len(self._stack) != 1:
                    raise PickleError("it does not end with exactly one value")
                return self._stack[0]
            action = actions.get(code)
            if action is None:
                raise PickleError(
                    f"opcode {bytes([code])!r} at byte {self.at - 1} is not one of plain values"
                )
            action(self)

    # --- pieces -----------------------------------------------------------------------------

    def _take(self, size: int) -> bytes:
        start, self.at = self.at, self.at + size
        if self.at > len(self._data):
            raise PickleError(f"it is cut short: byte {start} announces {size} more")
        return self._data[start : self.at]

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _line(self) -> str:
        start = self.at
        self.at = self._data.index(b"\n", start) + 1
        return self._data[start : self.at - 1].decode()

    def _since_mark(self) -> list[Any]:
        if not self._below:
            raise PickleError(f"there is no mark for byte {self.at - 1}")
        items, self._stack = self._stack, self._below.pop()
        return items

    def _top(self, kind: type) -> Any:
        top = self._stack[-1]
        if type(top) is not kind:
            raise PickleError(
                f"it appends to a {type(top).__name__} as if it were a {kind.__name__}"
            )
        return top

    # --- opcodes ----------------------------------------------------------------------------

    def _proto(self) -> None:
        (protocol,) = self._take(1)
        if protocol not in PROTOCOLS:
            raise PickleError(f"protocol {protocol} is none of {list(PROTOCOLS)}")

    def _frame(self) -> None:
        if self._number(8) > len(self._data) - self.at:
            raise PickleError("it is cut short")

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _text(self, size: int) -> None:
        self._stack.append(str(self._take(self._number(size)), "utf-8", "surrogatepass"))

    def _bytes(self, size: int) -> None:
        self._stack.append(self._take(self._number(size)))

    def _signed(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def _long(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._number(1)), "little", signed=True))

    def _float(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def _last_as_tuple(self, count: int) -> None:
        stack = self._stack
        if len(stack) < count:
            raise PickleError(f"there are no {count} values for byte {self.at - 1}")
        stack[-count:] = [tuple(stack[-count:])]

    def _marked_tuple(self) -> None:
        items = self._since_mark()
        self._stack.append(tuple(items))

    def _append(self) -> None:
        value = self._stack.pop()
        self._top(list).append(value)

    def _appends(self) -> None:
        items = self._since_mark()
        self._top(list).extend(items)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._top(dict)[checked_key(key, self._table.keys)] = value

    def _set_items(self) -> None:
        items = self._since_mark()
        into, keys = self._top(dict), self._table.keys
        for key, value in zip(items[::2], items[1::2], strict=True):
            into[checked_key(key, keys)] = value

    def _add_items(self) -> None:
        items = self._since_mark()
        self._top(set).update(checked_key(item, self._table.keys) for item in items)

    def _frozen_set(self) -> None:
        items = self._since_mark()
        self._stack.append(frozenset(checked_key(item, self._table.keys) for item in items))

    def _get(self) -> None:
        self._stack.append(self._memo[self._data[self.at]])
        self.at += 1

    def _get_long(self) -> None:
        self._stack.append(self._memo[self._number(4)])

    def _put(self, size: int) -> None:
        self._memo[self._number(size)] = self._stack[-1]

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _named(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise PickleError("it names a class or function by something other than text")
        found = self._table.names.get((module, name))
        if found is None:
            full = f"{module}.{name}"
            raise PickleError(f"it refers to {full if full.isprintable() else repr(full)}"[:200])
        self._stack.append(found)

    def _global(self) -> None:
        module = self._line()
        self._named(module, self._line())

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._named(module, name)

    def _make(self) -> None:
        """REDUCE and NEWOBJ: apply a Maker to a tuple of arguments."""
        arguments, maker = self._stack.pop(), self._stack.pop()
        if type(maker) is not Maker or type(arguments) is not tuple:
            raise PickleError(f"it calls a {type(maker).__name__}, which is no class or function")
        for own in arguments:
            if type(own) in _SIZED:
                self._left -= len(own)
        if self._left < 0:
            raise PickleError("it expands to more values than its size allows")
        self._stack.append(maker.make(*arguments))

    def _build(self) -> None:
        state = self._stack.pop()
        build = self._table.build.get(type(self._stack[-1]))
        if build is None:
            raise PickleError(f"it sets the state of a {type(self._stack[-1]).__name__}")
        build(self._stack[-1], state)

    def _stored(self) -> None:
        if self._persistent is None:
            raise PickleError("it refers to an object that is stored outside of it")
        self._stack.append(self._persistent(self._stack.pop()))


_STOP = ord(".")
_ACTIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: _Machine._proto,
    0x95: _Machine._frame,
    ord("("): _Machine._mark,
    ord("N"): lambda m: m._stack.append(None),
    0x88: lambda m: m._stack.append(True),
    0x89: lambda m: m._stack.append(False),
    ord("K"): lambda m: m._stack.append(m._number(1)),
    ord("M"): lambda m: m._stack.append(m._number(2)),
    ord("J"): _Machine._signed,
    0x8A: _Machine._long,
    ord("G"): _Machine._float,
    0x8C: lambda m: m._text(1),
    ord("X"): lambda m: m._text(4),
    0x8D: lambda m: m._text(8),
    ord("C"): lambda m: m._bytes(1),
    ord("B"): lambda m: m._bytes(4),
    0x8E: lambda m: m._bytes(8),
    ord(")"): lambda m: m._stack.append(()),
    0x85: lambda m: m._last_as_tuple(1),
    0x86: lambda m: m._last_as_tuple(2),
    0x87: lambda m: m._last_as_tuple(3),
    ord("t"): _Machine._marked_tuple,
    ord("]"): lambda m: m._stack.append([]),
    ord("a"): _Machine._append,
    ord("e"): _Machine._appends,
    ord("}"): lambda m: m._stack.append({}),
    ord("s"): _Machine._set_item,
    ord("u"): _Machine._set_items,
    0x8F: lambda m: m._stack.append(set()),
    0x90: _Machine._add_items,
    0x91: _Machine._frozen_set,
    ord("h"): _Machine._get,
    ord("j"): _Machine._get_long,
    ord("q"): lambda m: m._put(1),
    ord("r"): lambda m: m._put(4),
    0x94: _Machine._memoize,
    ord("c"): _Machine._global,
    0x93: _Machine._stack_global,
    ord("R"): _Machine._make,
    0x81: _Machine._make,
    ord("b"): _Machine._build,
    ord("Q"): _Machine._stored,
}
