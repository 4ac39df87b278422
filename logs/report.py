"""A report on a log in plain numbers: regularity of the stamps and state of every channel."""

import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from logs import checks
from logs.checks import ClockRatio, Held, Offset, QuaternionCheck, Role, Saturation, Timing
from logs.data import Channel, Topic
from robots.spec import RobotSpec

Level = Literal["fault", "hint", "info"]
LEVELS: tuple[Level, ...] = ("fault", "hint", "info")
LIMITS: dict[Role, str] = {"position": "pos_limit", "velocity": "vel_limit", "effort": "effort_limit"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something worth a sentence."""

    level: Level
    """fault: the data are wrong; hint: they may be; info: good to know."""
    topic: str
    """Topic it is about."""
    field: str
    """Field it is about, "" for the whole topic."""
    text: str
    """The sentence."""


@dataclass(frozen=True, kw_only=True)
class ElementReport:
    """One column of a channel."""

    name: str
    """Element name."""
    minimum: float
    """Smallest finite value; NaN if there is none."""
    maximum: float
    """Largest finite value; NaN if there is none."""
    nan: int
    """Samples that are not a number."""
    inf: int
    """Samples that are infinite."""
    constant: bool
    """Whether the value never changes."""
    whole: bool
    """Whether all values are whole numbers."""
    wrapped_bits: int
    """Width of the unsigned integer that negative values were squeezed into, 0 if they were not."""
    beyond_turn: bool
    """Whether the magnitude exceeds 2 pi for a good part of the time."""
    saturation: tuple[Saturation, ...]
    """Own extremes or robot limits it sits at."""


@dataclass(frozen=True, kw_only=True)
class ChannelReport:
    """One field of a topic."""

    field: str
    """Field name."""
    unit: str | None
    """Unit where known."""
    role: Role
    """What it measures."""
    command: bool
    """Whether it is a command."""
    held: Held | None
    """How long values are held, if they are."""
    elements: tuple[ElementReport, ...]
    """Its columns."""


@dataclass(frozen=True, kw_only=True)
class TopicReport:
    """One topic."""

    name: str
    """Topic name."""
    msgtype: str
    """Message type."""
    count: int
    """Messages."""
    clock: str
    """Stamps used: header, receive, none, or "file name" for a rate that only the file's name tells."""
    timing: Timing | None
    """Regularity of the stamps; None without stamps."""
    offset: Offset | None
    """Receive minus header stamps, where there are both."""
    repeated_rows: int
    """Messages equal to the one before in every field."""
    channels: tuple[ChannelReport, ...]
    """Fields."""
    clock_ratios: dict[str, ClockRatio]
    """By position field: what the velocities say about the clock."""
    quaternions: dict[str, QuaternionCheck]
    """By orientation field."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found in one log."""

    path: Path
    """What was opened."""
    format: str
    """Kind of file."""
    robot: str | None
    """Robot whose limits were compared with."""
    info: dict[str, str]
    """What the log says about itself."""
    topics: tuple[TopicReport, ...]
    """Topics in file order."""
    findings: tuple[Finding, ...]
    """Faults first."""
    problems: tuple[str, ...]
    """What could not be read."""
    notes: tuple[str, ...]
    """What was assumed."""

    @property
    def complete(self) -> bool:
        """Whether the file could be read in full."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-compatible values; numbers that JSON lacks become null."""
        return dict(_plain({**asdict(self), "complete": self.complete}))


def named_rate(path: Path) -> float | None:
    """A rate that only the file's name tells [Hz]."""
    match = re.search(r"(\d+(?:\.\d+)?) ?hz", path.name, re.IGNORECASE)
    return float(match[1]) if match and float(match[1]) > 0 else None


def report_topic(topic: Topic, spec: RobotSpec | None = None, named_rate: float | None = None) -> TopicReport:
    """Check one topic, against the limits of a robot if `spec` is given; `named_rate` [Hz] stands in for stamps."""
    stamps = topic.stamp_ns
    clock = "file name" if stamps is None and named_rate else topic.clock
    both = topic.header_ns is not None and topic.receive_ns is not None
    return TopicReport(
        name=topic.name,
        msgtype=topic.msgtype,
        count=topic.count,
        clock=clock,
        timing=None if stamps is None else checks.timing(stamps),
        offset=checks.offset(topic.header_ns, topic.receive_ns) if both else None,  # type: ignore[arg-type]
        repeated_rows=_repeated_rows(topic),
        channels=tuple(_channel(c, topic.name, spec) for c in topic.channels.values()),
        clock_ratios=_clock_ratios(topic, named_rate),
        quaternions=_quaternions(topic),
    )


def _repeated_rows(topic: Topic) -> int:
    """Rows that equal the one before in every channel; 0 where nothing could be decoded."""
    if topic.count < 2 or not topic.channels:
        return 0
    same = np.ones(topic.count - 1, dtype=bool)
    for channel in topic.channels.values():
        same &= ~checks.changes(channel.values)
    return int(same.sum())


def _channel(channel: Channel, topic: str, spec: RobotSpec | None) -> ChannelReport:
    role = checks.role(channel.field)
    command = checks.is_command(channel.field) or checks.is_command(topic)
    values = checks.as_float(channel.values)
    whole = checks.whole_numbers(values)
    far = checks.beyond_turn(values)
    limits = _limits(channel, role, spec)
    elements = (
        _element(n, values[:, i], bool(whole[i]), bool(far[i]) and role == "position", command, limits[i])
        for i, n in enumerate(channel.names)
    )
    return ChannelReport(
        field=channel.field,
        unit=channel.unit,
        role=role,
        command=command,
        held=checks.held(channel.values),
        elements=tuple(elements),
    )


def _limits(channel: Channel, role: Role, spec: RobotSpec | None) -> list[tuple[float, float] | None]:
    """The robot's limits of each element, None where it has none under that name."""
    if spec is None or role not in LIMITS:
        return [None] * len(channel.names)
    limits: list[tuple[float, float] | None] = []
    for name in channel.names:
        value = getattr(spec.joint(name), LIMITS[role]) if name in spec.joint_names else None
        limits.append(value if value is None or isinstance(value, tuple) else (-value, value))
    return limits


def _element(
    name: str, values: checks.Float, whole: bool, far: bool, command: bool, limit: tuple[float, float] | None
) -> ElementReport:
    finite = values[np.isfinite(values)]
    bits = checks.wrapped_bits(values)
    signed = checks.unwrapped(values, bits) if bits else values
    at_limit = checks.at_limit(signed, *limit) if limit else None
    # A command may rest at its largest value on purpose, and what sits at the robot's limit sits at its own extreme.
    saturation = [] if command or at_limit else checks.saturation(signed)
    return ElementReport(
        name=name,
        minimum=float(finite.min()) if len(finite) else math.nan,
        maximum=float(finite.max()) if len(finite) else math.nan,
        nan=int(np.isnan(values).sum()),
        inf=int(np.isinf(values).sum()),
        constant=len(finite) > 1 and bool((finite == finite[0]).all()),
        whole=whole,
        wrapped_bits=bits,
        beyond_turn=far,
        saturation=(*saturation, *([at_limit] if at_limit else [])),
    )


def _clock_ratios(topic: Topic, named_rate: float | None) -> dict[str, ClockRatio]:
    """Every measured position compared with the velocity that goes by the same name."""
    if checks.is_command(topic.name) or topic.count < 2:
        return {}
    seconds = topic.seconds()
    if seconds is None:
        seconds = np.arange(topic.count) / (named_rate or 1.0)
    measured = [c for c in topic.channels.values() if not checks.is_command(c.field)]
    velocities = {checks.pair_key(c.field): c for c in measured if checks.role(c.field) == "velocity"}
    ratios = {}
    for position in measured:
        velocity = velocities.get(checks.pair_key(position.field))
        if checks.role(position.field) == "position" and velocity is not None and velocity.names == position.names:
            ratio = checks.clock_ratio(
                seconds, checks.as_float(position.values), checks.as_float(velocity.values), position.names
            )
            if ratio is not None:
                ratios[position.field] = ratio
    return ratios


def _quaternions(topic: Topic) -> dict[str, QuaternionCheck]:
    """Orientations, checked against the acceleration of the same message or table where there is one."""
    accel = next((c for c in topic.channels.values() if "acc" in c.field and c.names == ("x", "y", "z")), None)
    result = {}
    for channel in topic.channels.values():
        if set(channel.names) == set("wxyz"):
            quat = checks.as_float(channel.select(tuple("wxyz")))
            check = checks.quaternion_check(quat, checks.as_float(accel.values) if accel else None)
            if check is not None:
                result[channel.field] = check
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
