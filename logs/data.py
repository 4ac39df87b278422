"""What a log holds once it is read: topics, channels, stamps. Plain numpy arrays, no file left open."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robots.errors import UnknownNameError

Stamps = NDArray[np.int64]
Values = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Channel:
    """One field of a topic over time."""

    field: str
    """Dotted path in the message, or the common part of the column names: `position`, `wrench.force`."""
    names: tuple[str, ...]
    """What each column of `values` is: joint names, x y z w, indices; one empty name for a scalar."""
    values: Values
    """Samples (T, K) in the number type they were logged in; NaN where a message lacked the field."""
    unit: str | None = None
    """SI unit where the message type or the column name fixes it."""

    def element(self, name: str) -> Values:
        """One column, (T,). Raises UnknownNameError."""
        if name not in self.names:
            raise UnknownNameError(f"element of {self.field}", name, self.names)
        return np.asarray(self.values[:, self.names.index(name)])

    def select(self, names: Sequence[str]) -> Values:
        """The columns of these names in this order, (T, len(names)). Raises UnknownNameError."""
        for name in names:
            if name not in self.names:
                raise UnknownNameError(f"element of {self.field}", name, self.names)
        return np.asarray(self.values[:, [self.names.index(n) for n in names]])


@dataclass(frozen=True, kw_only=True)
class Topic:
    """All messages of one topic, or all rows of one table, in the order they stand in the file."""

    name: str
    """Topic name, or the file's stem for a table."""
    msgtype: str
    """ROS message type, "csv" or "json"."""
    count: int
    """Number of messages or rows T, also where no field could be decoded."""
    channels: dict[str, Channel] = field(default_factory=dict)
    """Channels by field name."""
    receive_ns: Stamps | None = None
    """When the recorder received each message, (T,) [ns]."""
    header_ns: Stamps | None = None
    """When the sender says it was measured, (T,) [ns]; None if there is no header or it was never filled."""
    frame: str = ""
    """Frame id of the first message."""

    @property
    def stamp_ns(self) -> Stamps | None:
        """The best stamps there are, (T,) [ns]: the header's, else the recorder's, else None."""
        return self.receive_ns if self.header_ns is None else self.header_ns

    @property
    def clock(self) -> str:
        """Which stamps `stamp_ns` gives: "header", "receive" or "none"."""
        if self.header_ns is not None:
            return "header"
        return "none" if self.receive_ns is None else "receive"

    def seconds(self) -> NDArray[np.float64] | None:
        """Time since the first sample, (T,) [s]; None without stamps. Subtracts before it leaves the integers."""
        stamps = self.stamp_ns
        return None if stamps is None else (stamps - stamps[:1]).astype(np.float64) * 1e-9

    def channel(self, name: str) -> Channel:
        """The channel of this field. Raises UnknownNameError."""
        if name not in self.channels:
            raise UnknownNameError(f"field of {self.name}", name, self.channels)
        return self.channels[name]


@dataclass(frozen=True, kw_only=True)
class Log:
    """A log as far as it could be read."""

    path: Path
    """What was opened."""
    format: str
    """rosbag2 mcap, rosbag2 sqlite3, mcap, sqlite3, csv or json."""
    topics: dict[str, Topic]
    """Topics by name."""
    problems: tuple[str, ...] = ()
    """What could not be read, one sentence each; empty for a sound file."""
    notes: tuple[str, ...] = ()
    """What had to be assumed, one sentence each: time unit, missing header row, joint order."""
    info: dict[str, str] = field(default_factory=dict)
    """What the file says about itself: robot, model hash, bench settings."""

    def topic(self, name: str) -> Topic:
        """The topic of this name. Raises UnknownNameError."""
        if name not in self.topics:
            raise UnknownNameError(f"topic of {self.path.name}", name, self.topics)
        return self.topics[name]

    def channel(self, topic: str, field_name: str) -> Channel:
        """The channel of a topic. Raises UnknownNameError."""
        return self.topic(topic).channel(field_name)

    def series(self, topic: str, field_name: str, element: str = "") -> Values:
        """One column, (T,). Raises UnknownNameError."""
        return self.channel(topic, field_name).element(element)
