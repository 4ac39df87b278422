"""From serialised messages to columns of numbers.

Each message type is looked at once and turned into a list of leaves: numeric fields, small vectors, arrays, arrays of
messages. Reading a message is then a handful of attribute look-ups per leaf.
"""

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rosbags.interfaces import Nodetype
from rosbags.typesys import Stores, get_types_from_idl, get_types_from_msg, get_typestore
from rosbags.typesys.base import normalize_fieldname
from rosbags.typesys.store import Typestore

from logs import topics
from logs.bags import DAMAGE, Findings, RawMessage, RawTopic
from logs.data import Channel, Topic

if TYPE_CHECKING:
    from rosbags.interfaces.typing import Typesdict

TYPE_NAME = re.compile(r"[A-Za-z]\w*(/[A-Za-z]\w*){1,2}", re.ASCII)
"""Type names are checked before `rosbags` turns a definition into a class."""
BLOB_TYPES = {"uint8", "byte", "char", "octet"}
"""Open-ended arrays of these are pixels or packets; their checksum is kept instead."""
MAX_DEPTH = 8
TIME_TYPES = {"builtin_interfaces/msg/Time", "builtin_interfaces/msg/Duration"}
MAX_GROUPS = 8
"""More sets of names than this on one topic are not joints but labels of detections."""

Row = NDArray[Any] | Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One numeric field of a message type."""

    path: str
    """Dotted path."""
    read: Callable[[Any], Row]
    """Its elements in one message."""
    dtype: str
    """Number type."""
    names: tuple[str, ...] = ()
    """Element names where the type fixes them; otherwise they are counted."""


def leaves(store: Typestore, msgtype: str) -> list[Leaf]:
    """The numeric fields of a type; the header is left to `Topic`. Raises KeyError or RecursionError if it has none."""
    return [leaf for leaf in _walk(store, msgtype, (), 0) if not leaf.path.startswith("header.")]


def _walk(store: Typestore, msgtype: str, parents: tuple[str, ...], depth: int) -> Iterator[Leaf]:
    if depth > MAX_DEPTH:
        raise RecursionError(f"{msgtype} nests more than {MAX_DEPTH} deep")
    for name, (kind, what) in store.fielddefs[msgtype][1]:
        path = (*parents, normalize_fieldname(name))
        dotted = ".".join(path)
        if kind == Nodetype.BASE:
            if what[0] != "string":
                yield Leaf(path=dotted, read=_one(dotted), dtype=_dtype(str(what[0])), names=("",))
        elif kind == Nodetype.NAME:
            yield from _nested(store, str(what), path, depth)
        else:
            yield from _array(store, kind, what, dotted, depth)


def _nested(store: Typestore, msgtype: str, path: tuple[str, ...], depth: int) -> Iterator[Leaf]:
    dotted = ".".join(path)
    if msgtype in TIME_TYPES:
        yield Leaf(path=dotted, read=partial(_time, attrgetter(dotted)), dtype="int64", names=("ns",))
        return
    fields = store.fielddefs[msgtype][1]
    if len(fields) > 1 and all(kind == Nodetype.BASE and what[0] != "string" for _, (kind, what) in fields):
        names = tuple(n for n, _ in fields)
        read = attrgetter(*(f"{dotted}.{normalize_fieldname(n)}" for n in names))
        kinds = {_dtype(str(what[0])) for _, (_, what) in fields}
        yield Leaf(path=dotted, read=read, dtype=kinds.pop() if len(kinds) == 1 else "float64", names=names)
        return
    yield from _walk(store, msgtype, path, depth + 1)


def _array(store: Typestore, kind: Nodetype, what: Any, path: str, depth: int) -> Iterator[Leaf]:
    (inner_kind, inner), _ = what
    get = attrgetter(path)
    if inner_kind == Nodetype.NAME:
        if inner not in TIME_TYPES:
            for leaf in _walk(store, str(inner), (), depth + 1):
                yield Leaf(path=f"{path}.{leaf.path}", read=partial(_each, get, leaf.read), dtype=leaf.dtype)
    elif inner[0] in BLOB_TYPES and kind == Nodetype.SEQUENCE:
        yield Leaf(path=f"{path}.crc32", read=partial(_checksum, get), dtype="int64", names=("",))
    elif inner[0] != "string":
        yield Leaf(path=path, read=get, dtype=_dtype(str(inner[0])))


def _one(path: str) -> Callable[[Any], Row]:
    get = attrgetter(path)
    return lambda message: (get(message),)


def _time(get: Callable[[Any], Any], message: Any) -> Row:
    value = get(message)
    return (value.sec * 10**9 + value.nanosec,)


def _each(get: Callable[[Any], Any], read: Callable[[Any], Row], message: Any) -> Row:
    return [value for part in get(message) for value in read(part)]


def _checksum(get: Callable[[Any], Any], message: Any) -> Row:
    return (zlib.crc32(get(message)),)


def _dtype(base: str) -> str:
    return {"byte": "uint8", "char": "uint8", "octet": "uint8", "float128": "float64"}.get(base, base)


@dataclass(kw_only=True)
class _Group:
    """Messages of one topic that name the same things (joints, mostly)."""

    names: tuple[str, ...]
    receive: list[int] = field(default_factory=list)
    header: list[int] = field(default_factory=list)
    rows: list[list[Row]] = field(default_factory=list)
    frame: str = ""
    reordered: int = 0


class Decoder:
    """Decodes the messages of one topic."""

    def __init__(self, topic: RawTopic) -> None:
        """Prepare for `topic`. Raises whatever `rosbags` raises for a type it can't make sense of."""
        self.topic = topic
        self._store = _typestore(topic)
        self._leaves = leaves(self._store, topic.msgtype)
        fields = dict(self._store.fielddefs[topic.msgtype][1])
        self._has_header = fields.get("header") == (Nodetype.NAME, "std_msgs/msg/Header")
        self._has_names = fields.get("name") == (Nodetype.SEQUENCE, ((Nodetype.BASE, ("string", 0)), 0))
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._failures: dict[str, int] = {}
        self._shapeless = 0

    def message(self, data: bytes) -> Any:
        """One message as an object."""
        return self._store.deserialize_cdr(data, self.topic.msgtype)

    def add(self, raw: RawMessage) -> None:
        """Decode a message; one that can't be decoded is counted."""
        try:
            message = self.message(raw.data)
            names = tuple(message.name) if self._has_names else ()
            rows = [leaf.read(message) for leaf in self._leaves]
            stamp, frame = self._header(message)
        except DAMAGE as error:
            text = f"{type(error).__name__}: {error}"
            self._failures[text] = self._failures.get(text, 0) + 1
            return
        group = self._group(names)
        if group is None:
            self._shapeless += 1
            return
        if names != group.names:
            order = [names.index(n) for n in group.names]
            rows = [np.asarray(r)[order] if len(r) == len(order) else r for r in rows]
            group.reordered += 1
        group.receive.append(raw.receive_ns)
        group.header.append(stamp)
        group.rows.append(rows)
        group.frame = group.frame or frame

    def _header(self, message: Any) -> tuple[int, str]:
        if not self._has_header:
            return 0, ""
        stamp = message.header.stamp
        return stamp.sec * 10**9 + stamp.nanosec, message.header.frame_id

    def _group(self, names: tuple[str, ...]) -> _Group | None:
        key = tuple(sorted(names))
        if key not in self._groups:
            if len(self._groups) == MAX_GROUPS:
                return None
            self._groups[key] = _Group(names=names)
        return self._groups[key]

    def result(self, found: Findings) -> list[Topic]:
        """What was decoded: one topic, or one for each set of joints that shares its name. Faults go to `found`."""
        name = self.topic.name
        for text, count in self._failures.items():
            found.problems.append(f"{name}: {count} messages can't be decoded ({text})")
        if self._shapeless:
            found.problems.append(
                f"{name}: {self._shapeless} messages left out: more than {MAX_GROUPS} different sets of joints"
            )
        if len(self._groups) > 1:
            found.notes.append(f"{name} carries {len(self._groups)} different sets of joints: shown as separate topics")
        groups = list(self._groups.values()) or [_Group(names=())]
        return [
            self._topic(g, name if i == 0 else f"{name}#{i + 1}", bool(self._has_names), found)
            for i, g in enumerate(groups)
        ]

    def _topic(self, group: _Group, name: str, named: bool, found: Findings) -> Topic:
        if group.reordered:
            found.notes.append(
                f"{name}: {group.reordered} messages list their joints in another order: matched by name"
            )
        if len(set(group.names)) != len(group.names):
            found.problems.append(f"{name} names a joint twice: {', '.join(group.names)}")
            named = False
        header = np.array(group.header, dtype=np.int64)
        if self._has_header and len(header) and not header.any():
            found.notes.append(f"{name}: the sender never filled the header stamp: the recorder's stamps are used")
        channels = (
            _channel(
                leaf, [row[i] for row in group.rows], group.names if named else (), self.topic.msgtype, name, found
            )
            for i, leaf in enumerate(self._leaves)
        )
        return Topic(
            name=name,
            msgtype=self.topic.msgtype,
            count=len(group.rows),
            channels={c.field: c for c in channels if c is not None},
            receive_ns=np.array(group.receive, dtype=np.int64),
            header_ns=header if header.any() else None,
            frame=group.frame,
        )


def _channel(
    leaf: Leaf, rows: list[Row], labels: tuple[str, ...], msgtype: str, topic: str, found: Findings
) -> Channel | None:
    """The rows of a leaf as one array; None if it is always empty or its length keeps changing."""
    lengths = {len(r) for r in rows} - {0}
    if len(lengths) > 1:
        found.notes.append(f"{topic}: {leaf.path} has between {min(lengths)} and {max(lengths)} elements: left out")
        return None
    if rows and not lengths:
        return None
    width = lengths.pop() if lengths else len(leaf.names)
    if any(len(r) == 0 for r in rows):
        values = np.array([r if len(r) else np.full(width, np.nan) for r in rows], dtype=np.float64)
        missing = sum(len(r) == 0 for r in rows)
        found.notes.append(f"{topic}: {leaf.path} is empty in {missing} of {len(rows)} messages: NaN there")
    else:
        values = np.array(rows, dtype=leaf.dtype).reshape(len(rows), width)
    names = leaf.names or (labels if len(labels) == width else tuple(str(i) for i in range(width)))
    unit = topics.UNITS.get(msgtype, {}).get(leaf.path)
    return Channel(field=leaf.path, names=names, values=values, unit=unit)


def _typestore(topic: RawTopic) -> Typestore:
    """Types as the log itself defines them, otherwise ROS 2 Jazzy's.

    `rosbags` builds classes from definitions; its grammar admits identifiers and literals only, and the type's own
    name, which it would take as it is, is checked here.
    """
    if not TYPE_NAME.fullmatch(topic.msgtype):
        raise ValueError(f"'{topic.msgtype}' is no ROS 2 message type")
    if topic.serialization != "cdr":
        raise ValueError(f"serialised as '{topic.serialization}', only cdr is read")
    if topic.definition_format not in ("ros2msg", "ros2idl") or not topic.definition:
        store = topics.typestore()
        if topic.msgtype not in store.fielddefs:
            raise ValueError(f"the log holds no definition of {topic.msgtype} and it is no standard type")
        return store
    store = get_typestore(Stores.EMPTY)
    if topic.definition_format == "ros2msg":
        store.register(get_types_from_msg(topic.definition, topic.msgtype))
    else:
        store.register({name: what for text in _idl_parts(topic.definition) for name, what in text.items()})
    return store


def _idl_parts(definition: str) -> "Iterator[Typesdict]":
    """Types of the IDL files that one definition strings together."""
    for part in definition.split("=" * 80 + "\n"):
        if part.strip():
            yield get_types_from_idl(part.partition("\n")[2] if part.startswith("IDL:") else part)


def decode_all(raw: Iterable[RawMessage], found: Findings) -> dict[str, Topic]:
    """Topics of a whole log by name. What can't be decoded is counted and named in `found`."""
    decoders: dict[RawTopic, Decoder | None] = {}
    stamps: dict[RawTopic, list[int]] = {}
    for message in raw:
        decoder = _decoder(message.topic, decoders, found)
        if decoder is None:
            stamps.setdefault(message.topic, []).append(message.receive_ns)
        else:
            decoder.add(message)
    result: dict[str, Topic] = {}
    for topic in found.topics:
        decoder = _decoder(topic, decoders, found)
        parts = [_opaque(topic, stamps.get(topic, []))] if decoder is None else decoder.result(found)
        for part in parts:
            key = part.name if part.name not in result else f"{part.name} ({part.msgtype})"
            result[key] = part
    return result


def _decoder(topic: RawTopic, decoders: dict[RawTopic, Decoder | None], found: Findings) -> Decoder | None:
    if topic not in decoders:
        try:
            decoders[topic] = Decoder(topic)
        except DAMAGE as error:
            text = " ".join(str(error).split())[:200]
            found.problems.append(f"{topic.name}: messages of type '{topic.msgtype}' can't be decoded: {text}")
            decoders[topic] = None
    return decoders[topic]


def _opaque(topic: RawTopic, stamps: list[int]) -> Topic:
    receive = np.array(stamps, dtype=np.int64)
    return Topic(name=topic.name, msgtype=topic.msgtype, count=len(stamps), receive_ns=receive)
