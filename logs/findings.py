"""What a report says in sentences."""

import math
from collections.abc import Iterator

from logs import checks
from logs.checks import ClockRatio, Held, Offset, QuaternionCheck, Saturation, Timing
from logs.report import ChannelReport, ElementReport, Finding, Level, TopicReport

UNIT_RATIOS = (
    (180.0 / math.pi, "positions in degrees and velocities in rad/s?"),
    (math.pi / 180.0, "positions in radians and velocities in degrees/s?"),
    (1e3, "stamps in a unit a thousand times too small?"),
    (1e-3, "stamps in a unit a thousand times too large?"),
)
"""Clock ratios that speak of units rather than of clocks."""
UNIT_TOLERANCE = 0.1
NORM_TOLERANCE = 1e-3
MAX_DRIFT = 1e-4
"""Two clocks that drift apart faster than this are worth a word [s/s]."""
SHOWN = 4
"""Names and gaps listed before "and more"."""


def findings_of(topic: TopicReport) -> Iterator[Finding]:
    """Everything worth a sentence about a topic."""
    for level, field, text in _say_topic(topic):
        yield Finding(level=level, topic=topic.name, field=field, text=text)
    for channel in topic.channels:
        for level, text in _say_channel(channel, topic):
            yield Finding(level=level, topic=topic.name, field=channel.field, text=text)


def _say_topic(topic: TopicReport) -> Iterator[tuple[Level, str, str]]:
    if topic.timing is not None:
        for level, text in _say_timing(topic.timing):
            yield level, "", text
    if topic.offset is not None:
        for level, text in _say_offset(topic.offset):
            yield level, "", text
    if topic.repeated_rows:
        share = topic.repeated_rows / (topic.count - 1)
        yield "info", "", f"messages that repeat the one before in every field: {topic.repeated_rows} ({share:.0%})"
    for field, ratio in topic.clock_ratios.items():
        for level, text in _say_clock(ratio, topic):
            yield level, field, text
    for field, check in topic.quaternions.items():
        for level, text in _say_quaternion(check):
            yield level, field, text


def _say_timing(timing: Timing) -> Iterator[tuple[Level, str]]:
    if timing.gaps:
        threshold, largest = milliseconds(timing.gap_threshold), milliseconds(timing.gap_largest)
        where = _some([f"{s:.3f}" for s in timing.gap_starts])
        yield (
            "fault",
            f"gaps longer than {threshold} ({checks.GAP_FACTOR} median periods): {timing.gaps}, at {where} s, "
            f"largest {largest}, about {timing.missing} samples missing",
        )
    if timing.backwards:
        yield "fault", f"stamps that go back in time: {timing.backwards}"
    if timing.duplicates:
        yield "fault", f"stamps equal to the one before: {timing.duplicates}"


def _say_offset(offset: Offset) -> Iterator[tuple[Level, str]]:
    if offset.lowest == offset.highest == 0:
        yield "info", "receive stamps equal header stamps: only one clock was recorded"
    if offset.lowest < 0:
        yield "hint", f"received up to {milliseconds(-offset.lowest)} before it was stamped: the clocks differ"
    if abs(offset.drift) > MAX_DRIFT:
        yield "hint", f"header and receive stamps drift apart by {offset.drift * 1e6:.0f} ppm"


def _say_clock(ratio: ClockRatio, topic: TopicReport) -> Iterator[tuple[Level, str]]:
    implied, labelled = milliseconds(ratio.implied), milliseconds(ratio.period)
    if topic.clock == "none":
        yield "info", f"velocities imply a period of {implied} (r2 {ratio.r2:.3f}); the log tells none"
    elif ratio.faulty:
        guess = next((text for value, text in UNIT_RATIOS if abs(ratio.ratio / value - 1) < UNIT_TOLERANCE), "")
        over = (
            f" +- {milliseconds(ratio.spread * ratio.period)} over {len(ratio.elements)} joints" if ratio.spread else ""
        )
        yield (
            "fault",
            f"velocities imply a period of {implied}{over}, labelled {labelled} ({topic.clock}): "
            f"ratio {ratio.ratio:.3f}, between {ratio.low:.3f} and {ratio.high:.3f}, r2 {ratio.r2:.3f}; "
            f"{guess or 'the clock or the velocities are wrong'}",
        )


def _say_quaternion(check: QuaternionCheck) -> Iterator[tuple[Level, str]]:
    if check.norm_error > NORM_TOLERANCE:
        yield "fault", f"the norm of the quaternion is off by up to {check.norm_error:.3g}"
    if check.misplaced:
        proof = ""
        if check.tilt_error is not None and check.tilt_error_shifted is not None:
            proof = f": gravity is off by {check.tilt_error:.0f} deg, by {check.tilt_error_shifted:.0f} deg if shifted"
        yield "fault", f"w, x, y, z seem to be stored in the fields x, y, z, w{proof}"


def _say_channel(channel: ChannelReport, topic: TopicReport) -> Iterator[tuple[Level, str]]:
    yield from _say_missing(channel)
    for element in channel.elements:
        if element.wrapped_bits:
            size = 2**element.wrapped_bits
            yield (
                "fault",
                f"{_of(element)}signed values stored as uint{element.wrapped_bits}: "
                f"subtract {size} from {size // 2} and above",
            )
        for saturation in element.saturation:
            yield _say_saturation(element, saturation)
    far = [e.name for e in channel.elements if e.beyond_turn]
    if far:
        yield "hint", f"beyond 2 pi{_names(far, channel)}: degrees, or more than one turn"
    whole = [e.name for e in channel.elements if e.whole and not e.wrapped_bits]
    if whole and channel.role:
        yield "hint", f"whole numbers only{_names(whole, channel)}: raw counts rather than SI units?"
    constant = [e.name for e in channel.elements if e.constant]
    if constant:
        level: Level = "hint" if channel.role and not channel.command else "info"
        value = f" ({channel.elements[0].minimum:g})" if len(channel.elements) == 1 else ""
        yield level, f"never changes{value}{_names(constant, channel)}"
    if channel.held is not None:
        yield "info", _say_held(channel.held, topic)


def _say_missing(channel: ChannelReport) -> Iterator[tuple[Level, str]]:
    for what in ("nan", "inf"):
        counts = {e.name: getattr(e, what) for e in channel.elements if getattr(e, what)}
        if counts:
            yield "fault", f"{what} values: {sum(counts.values())}{_names(list(counts), channel)}"


def _say_saturation(element: ElementReport, saturation: Saturation) -> tuple[Level, str]:
    own = saturation.kind != "limit"
    where = f"its own {saturation.kind}" if own else "the robot's limit"
    return (
        "hint" if own else "fault",
        f"{_of(element)}sits at {where} {saturation.value:.4g} for up to {saturation.longest} samples in a row, "
        f"{saturation.samples} in all",
    )


def _say_held(held: Held, topic: TopicReport) -> str:
    text = f"changes every {held.rows} rows ({held.matching} of {held.intervals} intervals)"
    if topic.timing is not None and topic.timing.rate:
        text += f": effective rate {topic.timing.rate / held.rows:.4g} Hz"
    return text


def _of(element: ElementReport) -> str:
    return f"{element.name} " if element.name else ""


def _names(names: list[str], channel: ChannelReport) -> str:
    """Which elements, unless it is all of them."""
    if len(names) == len(channel.elements):
        return ""
    return f" in {_some(names)}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def milliseconds(seconds: float) -> str:
    """A time in ms, four digits."""
    return f"{seconds * 1e3:.4g} ms"
