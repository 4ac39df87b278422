"""Raw messages out of MCAP and sqlite3 storage, also out of damaged files. Nothing is decoded here.

The readers of `rosbags` and `mcap` refuse a file at its first fault. Here a fault costs as little as possible and is
named: with an index at the end of an MCAP file every message is fetched by its own offset, without one the file is
read from the front for as long as it makes sense; a damaged database is read from both ends.
"""

import contextlib
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import zstandard
from mcap.data_stream import ReadDataStream
from mcap.opcode import Opcode
from mcap.reader import make_reader
from mcap.records import Channel, Chunk, ChunkIndex, Message, MessageIndex, Metadata, Schema, Statistics
from mcap.stream_reader import get_chunk_data_stream
from mcap.summary import Summary

from robots.errors import UserError

MCAP_MAGIC = b"\x89MCAP0\r\n"
SQLITE_MAGIC = b"SQLite format 3\x00"
HEAD = struct.Struct("<BQ")
"""Opcode and length that precede every MCAP record."""
SHORTEST_MESSAGE = 22
"""Channel, sequence, log time, publish time [bytes]."""
LATEST_NS = 2**63 - 1
"""Later stamps don't fit 64 signed bits; only damage makes them."""
LARGEST_CHUNK = 2**32
"""A chunk that claims to be larger than this is taken for damaged [bytes]."""


@dataclass(frozen=True, kw_only=True)
class RawTopic:
    """A topic as the storage describes it."""

    name: str
    """Topic name."""
    msgtype: str
    """Message type, "" where the file does not say."""
    serialization: str
    """cdr for ROS 2."""
    definition_format: str = ""
    """ros2msg, ros2idl or "" if the file holds no definition."""
    definition: str = ""
    """Text of the message definition."""


@dataclass(frozen=True, kw_only=True)
class RawMessage:
    """One serialised message."""

    topic: RawTopic
    """Topic it came on."""
    receive_ns: int
    """When the recorder received it [ns]."""
    data: bytes
    """Serialised message."""


@dataclass(kw_only=True)
class Findings:
    """What came up while reading."""

    problems: list[str] = field(default_factory=list)
    """What could not be read."""
    notes: list[str] = field(default_factory=list)
    """What was assumed."""
    topics: list[RawTopic] = field(default_factory=list)
    """Topics that were declared, also those without a message."""
    info: dict[str, str] = field(default_factory=dict)
    """What the file says about itself."""

    def declare(self, topic: RawTopic) -> RawTopic:
        """Remember a topic."""
        if topic not in self.topics:
            self.topics.append(topic)
        return topic


# Damaged bytes can make any of these out of a parser; the place is named wherever they are caught.
DAMAGE = (Exception,)
# Python fails to decode SQLite's own message where that quotes damaged text.
SQLITE_DAMAGE = (sqlite3.Error, UnicodeDecodeError)


def read_mcap(path: Path, found: Findings) -> Iterator[RawMessage]:
    """Messages of an MCAP file in file order; faults go to `found`."""
    with path.open("rb") as file:
        if file.read(len(MCAP_MAGIC)) != MCAP_MAGIC:
            found.problems.append(f"{path.name} does not begin like an MCAP file: its first bytes are damaged")
        summary = _summary(file, path.name, found)
        if summary is not None and summary.chunk_indexes:
            yield from _by_index(file, summary, path.name, found)
        else:
            yield from _from_the_front(file, path.name, found, summary)


def _summary(file: BinaryIO, name: str, found: Findings) -> Summary | None:
    file.seek(0)
    try:
        return make_reader(file).get_summary()
    except DAMAGE as error:
        reason = str(error) or type(error).__name__
        found.problems.append(
            f"{name} has no index at its end, it was cut off or is damaged ({reason}): it is read from the front"
        )
        return None


def _by_index(file: BinaryIO, summary: Summary, name: str, found: Findings) -> Iterator[RawMessage]:
    topics = {i: found.declare(_mcap_topic(c, summary.schemas)) for i, c in summary.channels.items()}
    found.info.update(_mcap_info(file, summary))
    count = 0
    for index in sorted(summary.chunk_indexes, key=lambda c: c.chunk_start_offset):
        try:
            data = _chunk_data(file, index)
        except DAMAGE as error:
            found.problems.append(f"{name}: chunk at byte {index.chunk_start_offset} can't be unpacked ({error})")
            continue
        lost = 0
        for entry in _entries(file, index, data):
            message = _message_at(data, entry, topics)
            lost += message is None
            if message is not None:
                count += 1
                yield message
        if lost:
            found.problems.append(
                f"{name}: {lost} messages in the chunk at byte {index.chunk_start_offset} are damaged"
            )
    _compare_count(count, summary.statistics, name, found)


def _chunk_data(file: BinaryIO, index: ChunkIndex) -> bytes:
    file.seek(index.chunk_start_offset + HEAD.size)
    return _unpack(file.read(min(index.chunk_length, LARGEST_CHUNK) - HEAD.size))


def _unpack(body: bytes) -> bytes:
    chunk = Chunk.read(_stream(body))
    if chunk.uncompressed_size > LARGEST_CHUNK:
        raise ValueError(f"it claims {chunk.uncompressed_size} bytes")
    # The checksum is left alone: one flipped bit must not cost a whole chunk. Decompression notices most damage.
    stream, length = get_chunk_data_stream(chunk)
    return stream.read(length)


def _entries(file: BinaryIO, index: ChunkIndex, data: bytes) -> list[tuple[int, int | None]]:
    """Offset in the chunk and log time of every message, in file order; times are None if the index is damaged."""
    entries: list[tuple[int, int | None]] = []
    try:
        for offset in index.message_index_offsets.values():
            file.seek(offset)
            opcode, length = HEAD.unpack(file.read(HEAD.size))
            if opcode != Opcode.MESSAGE_INDEX or length > index.message_index_length:
                raise ValueError("no message index")
            records = MessageIndex.read(_stream(file.read(length))).records
            entries.extend((at, time) for time, at in records)
    except DAMAGE:
        return [(at, None) for opcode, at, _ in _records(data) if opcode == Opcode.MESSAGE]
    return sorted(entries, key=lambda e: e[0])


def _message_at(data: bytes, entry: tuple[int, int | None], topics: dict[int, RawTopic]) -> RawMessage | None:
    """The message at an offset of a chunk, or None if what stands there does not look like one."""
    at, time = entry
    if at + HEAD.size > len(data):
        return None
    opcode, length = HEAD.unpack_from(data, at)
    end = at + HEAD.size + length
    if opcode != Opcode.MESSAGE or length < SHORTEST_MESSAGE or end > len(data):
        return None
    message = Message.read(_stream(data[at + HEAD.size : end]), length)
    if message.channel_id not in topics or (time is not None and message.log_time != time):
        return None
    if message.log_time > LATEST_NS:
        return None
    return RawMessage(topic=topics[message.channel_id], receive_ns=message.log_time, data=message.data)


def _compare_count(count: int, statistics: Statistics | None, name: str, found: Findings) -> None:
    if statistics is not None and statistics.message_count != count:
        found.problems.append(f"{name}: {count} of {statistics.message_count} messages could be read")


def _mcap_topic(channel: Channel, schemas: dict[int, Schema]) -> RawTopic:
    schema = schemas.get(channel.schema_id)
    return RawTopic(
        name=channel.topic,
        msgtype=schema.name if schema else "",
        serialization=channel.message_encoding,
        definition_format=schema.encoding if schema else "",
        definition=schema.data.decode("utf-8", errors="replace") if schema else "",
    )


def _mcap_info(file: BinaryIO, summary: Summary) -> dict[str, str]:
    """Free-text metadata records; those of rosbag2 repeat metadata.yaml and are left out."""
    info: dict[str, str] = {}
    for index in summary.metadata_indexes:
        if index.name != "rosbag2":
            with contextlib.suppress(*DAMAGE):  # they describe the log, no measurement is lost with them
                file.seek(index.offset + HEAD.size)
                info.update(Metadata.read(_stream(file.read(index.length - HEAD.size))).metadata)
    return info


def _from_the_front(file: BinaryIO, name: str, found: Findings, summary: Summary | None) -> Iterator[RawMessage]:
    """Messages of a file without an index: one that was cut off, or one that was never chunked."""
    size = file.seek(0, 2)
    state = _Scan(name=name, found=found, schemas=dict(summary.schemas) if summary else {})
    if summary:
        state.topics = {i: found.declare(_mcap_topic(c, summary.schemas)) for i, c in summary.channels.items()}
    at = len(MCAP_MAGIC)
    while at + HEAD.size <= size:
        file.seek(at)
        opcode, length = HEAD.unpack(file.read(HEAD.size))
        if opcode in (Opcode.DATA_END, Opcode.FOOTER):
            break
        cut = at + HEAD.size + length > size
        if cut and opcode not in (Opcode.CHUNK, Opcode.MESSAGE):
            found.problems.append(f"{name}: nothing makes sense from byte {at} of {size} on")
            break
        body = file.read(min(length, size - at - HEAD.size))
        if cut:
            found.problems.append(f"{name} ends inside a record at byte {at} of {size}")
        if opcode == Opcode.CHUNK:
            yield from state.chunk(body, at)
        elif not cut:
            yield from state.record(opcode, body, at)
        at += HEAD.size + length
    if summary is not None:
        _compare_count(state.count, summary.statistics, name, found)


@dataclass(kw_only=True)
class _Scan:
    """Schemas and channels met so far on the way from the front."""

    name: str
    found: Findings
    schemas: dict[int, Schema] = field(default_factory=dict)
    topics: dict[int, RawTopic] = field(default_factory=dict)
    count: int = 0

    def chunk(self, body: bytes, at: int) -> Iterator[RawMessage]:
        try:
            data = _unpack(body)
        except DAMAGE as error:
            self.found.problems.append(f"{self.name}: chunk at byte {at} can't be unpacked ({error})")
            return
        end = 0
        for opcode, offset, length in _records(data):
            end = offset + HEAD.size + length
            yield from self.record(opcode, data[offset + HEAD.size : end], at)
        if end != len(data):
            self.found.problems.append(
                f"{self.name}: the last {len(data) - end} bytes of the chunk at byte {at} are lost"
            )

    def record(self, opcode: int, body: bytes, at: int) -> Iterator[RawMessage]:
        try:
            if opcode == Opcode.SCHEMA:
                schema = Schema.read(_stream(body))
                self.schemas[schema.id] = schema
            elif opcode == Opcode.CHANNEL:
                channel = Channel.read(_stream(body))
                self.topics[channel.id] = self.found.declare(_mcap_topic(channel, self.schemas))
            elif opcode == Opcode.MESSAGE:
                message = Message.read(_stream(body), len(body))
                topic = self.topics[message.channel_id]
                if message.log_time > LATEST_NS:
                    raise ValueError(f"stamp {message.log_time} is out of range")
                self.count += 1
                yield RawMessage(topic=topic, receive_ns=message.log_time, data=message.data)
        except DAMAGE as error:
            self.found.problems.append(
                f"{self.name}: record near byte {at} is damaged ({type(error).__name__}: {error})"
            )


def _records(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Opcode, offset and body length of the records in a chunk, up to the first that can't be one."""
    at = 0
    while at + HEAD.size <= len(data):
        opcode, length = HEAD.unpack_from(data, at)
        if opcode not in (Opcode.SCHEMA, Opcode.CHANNEL, Opcode.MESSAGE) or at + HEAD.size + length > len(data):
            return
        yield opcode, at, length
        at += HEAD.size + length


def _stream(data: bytes) -> ReadDataStream:
    return ReadDataStream(BytesIO(data))


def read_sqlite3(path: Path, found: Findings) -> Iterator[RawMessage]:
    """Messages of a rosbag2 sqlite3 file in the order they were stored; faults go to `found`. Raises UserError."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(_database(path, Path(folder), found)) as database:
        topics = {i: found.declare(t) for i, t in _sqlite_topics(database, path).items()}
        unknown = 0
        for topic, receive_ns, data in _rows(database, path.name, found):
            if topic in topics and isinstance(data, bytes) and isinstance(receive_ns, int):
                yield RawMessage(topic=topics[topic], receive_ns=receive_ns, data=data)
            else:
                unknown += 1
        if unknown:
            found.problems.append(f"{path.name}: {unknown} rows belong to no topic or hold no message")


def _database(path: Path, folder: Path, found: Findings) -> sqlite3.Connection:
    """The database, read-only. One with an unfinished transaction beside it is copied first and completed there."""
    beside = [p for s in ("-wal", "-journal") if (p := path.with_name(path.name + s)).exists() and p.stat().st_size]
    mode = "mode=ro&immutable=1"
    if beside:
        found.notes.append(f"{path.name} was not closed: completed from {', '.join(p.name for p in beside)} in a copy")
        for part in (path, *beside):
            shutil.copyfile(part, folder / part.name)
        path, mode = folder / path.name, "mode=rw"
    database = sqlite3.connect(f"file:{quote(str(path.resolve()))}?{mode}", uri=True)
    database.execute("PRAGMA trusted_schema=OFF")
    database.text_factory = lambda text: text.decode("utf-8", errors="replace")
    promised, size = _promised_size(path), path.stat().st_size
    if size < promised:
        found.problems.append(f"{path.name} was cut off: it is damaged beyond byte {size} of {promised}")
        # SQLite opens a file that is shorter than its header says only in this mode; it stays read-only.
        database.execute("PRAGMA writable_schema=ON")
    return database


def _promised_size(path: Path) -> int:
    """Size that the header of a database gives: page size (1 stands for 65536) times number of pages [bytes]."""
    with path.open("rb") as file:
        start = file.read(32)
    if len(start) < 32:
        return 32
    page = int.from_bytes(start[16:18], "big")
    return (65536 if page == 1 else page) * int.from_bytes(start[28:32], "big")


def _sqlite_topics(database: sqlite3.Connection, path: Path) -> dict[int, RawTopic]:
    try:
        # Only tables: a view could run whatever its author liked.
        tables = {n for (n,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not {"topics", "messages"} <= tables:
            raise UserError(f"{path} is a database without topics and messages: not a rosbag2 file")
        definitions: dict[str, tuple[str, str]] = {}
        if "message_definitions" in tables:
            query = "SELECT topic_type, encoding, encoded_message_definition FROM message_definitions"
            definitions = {name: (str(encoding), str(text)) for name, encoding, text in database.execute(query)}
        rows = database.execute("SELECT id, name, type, serialization_format FROM topics ORDER BY id")
        return {
            i: RawTopic(
                name=str(name),
                msgtype=str(msgtype),
                serialization=str(serialization),
                definition_format=definitions.get(msgtype, ("", ""))[0],
                definition=definitions.get(msgtype, ("", ""))[1],
            )
            for i, name, msgtype, serialization in rows
        }
    except SQLITE_DAMAGE as error:
        raise UserError(f"{path} is a damaged database whose list of topics can't be read: {error}") from error


def _rows(database: sqlite3.Connection, name: str, found: Findings) -> Iterator[tuple[object, object, object]]:
    """Topic id, stamp and data of every message; past a damaged page from the far end."""
    query = "SELECT id, topic_id, timestamp, data FROM messages ORDER BY id"
    last: int | None = None
    try:
        for number, topic, stamp, data in database.execute(query):
            last = number
            yield topic, stamp, data
        return
    except SQLITE_DAMAGE as error:
        found.problems.append(f"{name} is damaged after message {last or 0}: {error}")
    tail: list[tuple[int, object, object, object]] = []
    with contextlib.suppress(*SQLITE_DAMAGE):  # the damage itself, met from its far side and said above
        for row in database.execute(f"{query} DESC"):
            if last is not None and row[0] <= last:
                break
            tail.append(row)
    for _, topic, stamp, data in reversed(tail):
        yield topic, stamp, data


def unpack_zstd(path: Path, folder: Path, found: Findings) -> Path:
    """A compressed storage file unpacked into `folder`, as far as it goes. Raises UserError if nothing comes out."""
    target = folder / path.name.removesuffix(".zstd").removesuffix(".zst")
    try:
        with path.open("rb") as packed, target.open("wb") as plain:
            zstandard.ZstdDecompressor().copy_stream(packed, plain)
    except zstandard.ZstdError as error:
        if not target.stat().st_size:
            raise UserError(f"{path} can't be unpacked: {error}") from error
        found.problems.append(f"{path.name} could be unpacked only in part: {error}")
    return target
