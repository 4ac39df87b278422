"""What can be wrong with a recorded signal, as pure functions on arrays.

Stamps are int64 nanoseconds (T,), samples are (T, K) or (T,). No function changes its input; NaN counts as missing.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from logs.data import Stamps, Values

Float = NDArray[np.float64]
Bool = NDArray[np.bool_]
Role = Literal["position", "velocity", "effort", ""]

GAP_FACTOR = 2.5
"""A pause longer than this many median periods is a gap."""
SATURATION_RUN = 10
"""Fewer samples in a row than this at the same extreme are no saturation."""
SATURATION_CONTRAST = 3
"""... nor are runs shorter than this many times what is usual elsewhere in the channel."""
SATURATION_MIN_VALUES = 9
"""Channels with fewer different values are switches and modes, which always sit at an extreme."""
LIMIT_SHARE = 0.995
"""At or above this share of the robot's limit a sample counts as being at the limit."""
HELD_SHARE = 0.8
"""Share of change intervals that must be equal before a signal is called held."""
HELD_CHANGES = 10
"""Fewer changes than this prove nothing about a held signal."""
CLOCK_WINDOW = 10
"""Rows over which velocity is integrated: long enough to even out encoder steps, short enough for many windows."""
CLOCK_MIN_WINDOWS = 20
CLOCK_MIN_R2 = 0.9
"""Below this share of explained position change the comparison proves nothing."""
CLOCK_TOLERANCE = 0.03
"""Deviations of the clock ratio from one up to this are not reported."""
TURN = 2 * np.pi
STATIONARY = 0.2
"""Accelerations within this share of their median are taken for gravity."""
INT_BITS = (16, 32)

ROLES: dict[str, Role] = {
    **dict.fromkeys(("q", "pos", "position", "angle", "theta", "jpos", "qpos"), "position"),
    **dict.fromkeys(("dq", "qd", "vel", "velocity", "speed", "jvel", "qvel", "omega", "qdot"), "velocity"),
    **dict.fromkeys(("tau", "torque", "effort", "load", "pwm", "current", "moment", "jeffort"), "effort"),
}
SWITCHES = {"enable", "enabled", "mode", "state", "status"}
"""Words that make a field a switch, whatever else its name says."""
COMMANDS = {"des", "desired", "goal", "target", "targets", "ref", "reference", "cmd", "command", "commands", "con"}


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How regular the stamps of a topic are. Times in seconds."""

    duration: float
    """First to last stamp."""
    period: float
    """Median of the positive steps."""
    rate: float
    """One over the median period [Hz]; 0 if time does not move."""
    period_std: float
    """Standard deviation of the positive steps that are no gaps."""
    period_p1: float
    """1st percentile of the positive steps."""
    period_p99: float
    """99th percentile of the positive steps."""
    gaps: int
    """Steps longer than `gap_threshold`."""
    gap_threshold: float
    """`GAP_FACTOR` median periods."""
    gap_largest: float
    """Longest step if it is a gap, else 0."""
    gap_starts: tuple[float, ...]
    """When gaps begin, since the first stamp."""
    missing: int
    """Samples that would fill the gaps."""
    backwards: int
    """Steps back in time."""
    duplicates: int
    """Stamps equal to the one before."""


def timing(stamps: Stamps) -> Timing | None:
    """Regularity of stamps (T,) [ns]; None for fewer than two."""
    if len(stamps) < 2:
        return None
    steps = np.diff(stamps)
    forward = steps[steps > 0] * 1e-9
    period = float(np.median(forward)) if len(forward) else 0.0
    at = np.flatnonzero(steps * 1e-9 > GAP_FACTOR * period) if period else np.array([], dtype=np.intp)
    regular = forward[forward <= GAP_FACTOR * period] if period else forward
    return Timing(
        duration=float(int(stamps[-1]) - int(stamps[0])) * 1e-9,
        period=period,
        rate=1.0 / period if period else 0.0,
        period_std=float(np.std(regular)) if len(regular) else 0.0,
        period_p1=float(np.percentile(forward, 1)) if len(forward) else 0.0,
        period_p99=float(np.percentile(forward, 99)) if len(forward) else 0.0,
        gaps=len(at),
        gap_threshold=GAP_FACTOR * period,
        gap_largest=float(steps[at].max() * 1e-9) if len(at) else 0.0,
        gap_starts=tuple(float(s) for s in (stamps[at] - stamps[0]) * 1e-9),
        missing=int(sum(round(s * 1e-9 / period) - 1 for s in steps[at])),
        backwards=int((steps < 0).sum()),
        duplicates=int((steps == 0).sum()),
    )


@dataclass(frozen=True, kw_only=True)
class Offset:
    """Receive stamp minus header stamp: transport delay, or two clocks."""

    median: float
    """Median [s]."""
    lowest: float
    """Smallest [s]; below zero messages arrive before they were sent, so the clocks differ."""
    highest: float
    """Largest [s]."""
    drift: float
    """Growth of the offset [s/s], by straight line."""


def offset(header: Stamps, receive: Stamps) -> Offset | None:
    """Receive minus header stamps; None for fewer than two messages."""
    if len(header) < 2:
        return None
    late = (receive - header) * 1e-9
    time = (header - header[0]) * 1e-9
    moving = float(np.ptp(time)) > 0
    return Offset(
        median=float(np.median(late)),
        lowest=float(late.min()),
        highest=float(late.max()),
        drift=float(np.polyfit(time, late, 1)[0]) if moving else 0.0,
    )


def as_float(values: Values) -> Float:
    """Values as floats, whatever type they were logged in."""
    return np.asarray(values, dtype=np.float64)


def run_lengths(values: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Start and length of each stretch of equal values (T,); NaN differs from everything."""
    if not len(values):
        return np.array([], dtype=np.intp), np.array([], dtype=np.intp)
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return starts, np.diff(np.append(starts, len(values)))


def longest_run(mask: Bool) -> int:
    """Longest stretch of true in (T,)."""
    starts, lengths = run_lengths(mask)
    hit = mask[starts] if len(starts) else mask
    return int(lengths[hit].max()) if hit.any() else 0


@dataclass(frozen=True, kw_only=True)
class Saturation:
    """A value that sits at an extreme."""

    kind: Literal["maximum", "minimum", "limit"]
    """Own extreme, or the robot's limit."""
    value: float
    """Where it sits."""
    samples: int
    """Samples there in all."""
    longest: int
    """Samples there in a row."""


def saturation(values: Float) -> list[Saturation]:
    """Own extremes that one channel element (T,) sits at for unusually many samples in a row."""
    finite = values[np.isfinite(values)]
    if len(finite) < SATURATION_RUN or len(np.unique(finite)) < SATURATION_MIN_VALUES:
        return []
    starts, lengths = run_lengths(finite)
    level = finite[starts]
    result = []
    extremes: tuple[tuple[Literal["maximum", "minimum"], float], ...] = (
        ("maximum", float(finite.max())),
        ("minimum", float(finite.min())),
    )
    for kind, value in extremes:
        there = level == value
        usual = float(np.percentile(lengths[~there], 95))
        longest = int(lengths[there].max())
        if longest >= max(SATURATION_RUN, SATURATION_CONTRAST * usual):
            result.append(Saturation(kind=kind, value=value, samples=int(lengths[there].sum()), longest=longest))
    return result


def at_limit(values: Float, lower: float, upper: float) -> Saturation | None:
    """Samples of one element (T,) at or beyond its limits; None if there are none.

    A limit is reached within `1 - LIMIT_SHARE` of half the range between the limits.
    """
    margin = (1.0 - LIMIT_SHARE) * 0.5 * (upper - lower)
    with np.errstate(invalid="ignore"):
        high, low = values >= upper - margin, values <= lower + margin
    there = high | low
    if not there.any():
        return None
    value = upper if high.sum() >= low.sum() else lower
    return Saturation(kind="limit", value=value, samples=int(there.sum()), longest=longest_run(there))


@dataclass(frozen=True, kw_only=True)
class Held:
    """A signal that changes every few rows only."""

    rows: int
    """Usual number of rows between changes."""
    share: float
    """Share of intervals with exactly this length."""
    intervals: int
    """Intervals seen."""
    matching: int
    """Intervals of exactly this length."""


def changes(values: Values) -> Bool:
    """Whether each row of (T, K) differs from the one before, (T - 1,); two NaN count as equal."""
    before, after = values[:-1], values[1:]
    same = before == after
    if np.issubdtype(values.dtype, np.floating):
        same |= np.isnan(before) & np.isnan(after)
    return np.asarray(~same.all(axis=1))


def held(values: Values) -> Held | None:
    """The hold of (T, K), if its rows change regularly but not every time; else None."""
    at = np.flatnonzero(changes(values))
    intervals = np.diff(at)
    if len(intervals) < HELD_CHANGES:
        return None
    lengths, counts = np.unique(intervals, return_counts=True)
    rows, matching = int(lengths[counts.argmax()]), int(counts.max())
    share = matching / len(intervals)
    if rows < 2 or share < HELD_SHARE:
        return None
    return Held(rows=rows, share=share, intervals=len(intervals), matching=matching)


@dataclass(frozen=True, kw_only=True)
class ClockRatio:
    """How the time that velocities imply compares with the time that stamps tell."""

    ratio: float
    """Implied over labelled time step; median over elements."""
    spread: float
    """Standard deviation of the ratio over elements; 0 for one element."""
    low: float
    """Lower end of the interval for the ratio."""
    high: float
    """Upper end of the interval for the ratio."""
    r2: float
    """Share of the position change that the velocity explains; median over elements."""
    elements: tuple[str, ...]
    """Elements that moved enough to be compared."""
    windows: int
    """Windows compared per element."""
    period: float
    """Labelled period [s]."""
    implied: float
    """Implied period [s]."""
    faulty: bool
    """Whether one lies outside the interval and the ratio is off by more than the tolerance."""


def clock_ratio(seconds: Float, position: Float, velocity: Float, names: tuple[str, ...]) -> ClockRatio | None:
    """Compare positions (T, K) with the integral of velocities (T, K) over stamps (T,) [s]; None if nothing moves.

    Over windows of `CLOCK_WINDOW` rows without gaps, steps back or missing samples, the position change y is fitted by
    y = ratio * x, x the trapezoid integral of the velocity over the labelled time. Too slow a clock label, or too
    large a velocity, gives a ratio below one. The interval spans three standard errors of the slope, widened at the
    top by 1 / r2 (the inverse regression, which bounds the bias from noise in x) and on both sides by half a step of
    the velocity's resolution over its mean magnitude (rounding, which need not average out).
    """
    starts, x, y = _windows(seconds, position, velocity)
    if len(starts) < CLOCK_MIN_WINDOWS:
        return None
    xx, yy, xy = (x * x).sum(axis=0), (y * y).sum(axis=0), (x * y).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope, r2 = xy / xx, xy**2 / (xx * yy)
        error = np.sqrt(((y - slope * x) ** 2).sum(axis=0) / (len(starts) - 1) / xx)
    good = np.isfinite(slope) & (slope > 0) & (r2 > CLOCK_MIN_R2)
    if not good.any():
        return None
    slope, r2, error = slope[good], r2[good], error[good]
    rounding = np.array([_rounding(v) for v in velocity.T[good]])
    ratio, period = float(np.median(slope)), float(np.median(np.diff(seconds)))
    low = float(np.median(slope * (1 - rounding) - 3 * error))
    high = float(np.median(slope / r2 * (1 + rounding) + 3 * error))
    return ClockRatio(
        ratio=ratio,
        spread=float(np.std(slope)),
        low=low,
        high=high,
        r2=float(np.median(r2)),
        elements=tuple(n for n, g in zip(names, good, strict=True) if g),
        windows=len(starts),
        period=period,
        implied=ratio * period,
        faulty=not low <= 1.0 <= high and abs(ratio - 1.0) > CLOCK_TOLERANCE,
    )


def _rounding(values: Float) -> float:
    """Half the smallest step between different values over their mean magnitude."""
    finite = values[np.isfinite(values)]
    levels = np.unique(finite)
    size = float(np.mean(np.abs(finite)))
    return 0.5 * float(np.diff(levels).min()) / size if len(levels) > 1 and size > 0 else 0.0


def _windows(seconds: Float, position: Float, velocity: Float) -> tuple[NDArray[np.intp], Float, Float]:
    """Starts of usable windows, integrated velocity and position change, (W,), (W, K), (W, K)."""
    empty = np.zeros((0, position.shape[1]))
    if len(seconds) <= CLOCK_WINDOW:
        return np.array([], dtype=np.intp), empty, empty
    step = np.diff(seconds)
    usable = (step > 0) & (step <= GAP_FACTOR * np.median(step[step > 0]) if (step > 0).any() else 0)
    travel = 0.5 * (velocity[1:] + velocity[:-1]) * step[:, None]
    # A jump of half a turn between two samples is an encoder wrapping around, not motion.
    usable &= np.isfinite(travel).all(axis=1) & (np.abs(np.diff(position, axis=0)) < np.pi).all(axis=1)
    starts = np.arange(0, len(seconds) - CLOCK_WINDOW, CLOCK_WINDOW)
    whole = np.array([usable[s : s + CLOCK_WINDOW].all() for s in starts], dtype=bool)
    starts = starts[whole]
    x = np.array([travel[s : s + CLOCK_WINDOW].sum(axis=0) for s in starts]).reshape(len(starts), position.shape[1])
    return starts, x, position[starts + CLOCK_WINDOW] - position[starts]


def beyond_turn(values: Float) -> Bool:
    """Elements of (T, K) whose magnitude exceeds 2 pi in more than one sample of a hundred, (K,)."""
    finite = np.where(np.isfinite(values), np.abs(values), 0.0)
    return np.asarray(np.percentile(finite, 99, axis=0) > TURN) if len(values) else np.zeros(values.shape[1], bool)


def whole_numbers(values: Float) -> Bool:
    """Elements of (T, K) that hold more than two different values, all of them whole, (K,)."""
    finite = [v[np.isfinite(v)] for v in values.T]
    return np.array([len(np.unique(v)) > 2 and bool((v == np.round(v)).all()) for v in finite], dtype=bool)


def wrapped_bits(values: Float) -> int:
    """Width of the unsigned integer that negative values (T,) were squeezed into; 0 if there is no sign of it.

    The sign: whole numbers from 0 to 2**bits - 1 that jump across half that range between samples and leave the
    middle of it empty.
    """
    finite = values[np.isfinite(values)]
    if len(finite) < 2 or finite.min() < 0 or not (finite == np.round(finite)).all():
        return 0
    for bits in INT_BITS:
        whole, half = 2.0**bits, 2.0 ** (bits - 1)
        if half <= finite.max() < whole:
            middle = (finite > 0.25 * whole) & (finite < 0.75 * whole)
            jumps = np.abs(np.diff(finite)) > half
            return bits if jumps.any() and not middle.any() else 0
    return 0


def unwrapped(values: Float, bits: int) -> Float:
    """Two's complement undone: values (T,) of 2**(bits - 1) and more become negative."""
    return np.where(values >= 2.0 ** (bits - 1), values - 2.0**bits, values)


@dataclass(frozen=True, kw_only=True)
class QuaternionCheck:
    """Whether unit quaternions are what their labels say."""

    norm_error: float
    """Largest deviation of the norm from one."""
    tilt_error: float | None
    """Median angle between measured gravity and the one the orientation predicts [deg]; None without acceleration."""
    tilt_error_shifted: float | None
    """The same if the components were stored scalar first under the labels x, y, z, w [deg]."""
    misplaced: bool
    """Whether the components seem to be in the wrong order."""


def quaternion_check(quat: Float, accel: Float | None) -> QuaternionCheck | None:
    """Check quaternions (T, 4) in the order (w, x, y, z), body to world, with accelerations (T, 3) in the body frame.

    Someone who copies (w, x, y, z) into fields (x, y, z, w) shifts every component by one. At rest an accelerometer
    points up, which only one of the two readings agrees with; without one, a robot that hangs upside down all the
    time by its labels and upright when shifted is suspect. None if nothing is finite.
    """
    rows = np.isfinite(quat).all(axis=1) & (np.linalg.norm(np.nan_to_num(quat), axis=1) > 0)
    rows &= np.isfinite(accel).all(axis=1) if accel is not None else True
    if not rows.any():
        return None
    quat = quat[rows]
    norm = np.linalg.norm(quat, axis=1)
    unit = quat / norm[:, None]
    shifted = np.roll(unit, -1, axis=1)
    if accel is None or not np.any(accel[rows]):
        labelled, other = _up(unit)[:, 2], _up(shifted)[:, 2]
        tilt = tilt_shifted = None
        misplaced = bool(np.median(labelled) < 0 and np.median(other) > 0.9)
    else:
        still, up = _gravity(accel[rows])
        tilt, tilt_shifted = _angle(_up(unit[still]), up), _angle(_up(shifted[still]), up)
        misplaced = tilt > 30.0 and tilt_shifted < 10.0
    return QuaternionCheck(
        norm_error=float(np.max(np.abs(norm - 1.0))),
        tilt_error=tilt,
        tilt_error_shifted=tilt_shifted,
        misplaced=misplaced,
    )


def _up(quat: Float) -> Float:
    """The world's z axis in the body frame, (T, 3): last row of the rotation matrix of (w, x, y, z)."""
    w, x, y, z = quat.T
    return np.stack([2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)], axis=1)


def _gravity(accel: Float) -> tuple[Bool, Float]:
    """Rows that are close to gravity alone and their unit directions."""
    size = np.linalg.norm(accel, axis=1)
    still = (np.abs(size - np.median(size)) <= STATIONARY * np.median(size)) & (size > 0)
    return still, accel[still] / size[still, None]


def _angle(a: Float, b: Float) -> float:
    return float(np.degrees(np.median(np.arccos(np.clip((a * b).sum(axis=1), -1.0, 1.0)))))


def words(name: str) -> tuple[str, ...]:
    """Words of a field name, lower case, without numbers: jpos_des is jpos, des."""
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", name)
    return tuple(re.findall(r"[a-z]+", spaced.lower()))


def role(name: str) -> Role:
    """What a field measures, judged by its name; "" if that can't be told."""
    if SWITCHES & set(words(name.rpartition(".")[2])):
        return ""
    return next((ROLES[w] for w in words(name) if w in ROLES), "")


def is_command(name: str) -> bool:
    """Whether a field holds what was asked for rather than what was measured, judged by its name."""
    return any(w in COMMANDS for w in words(name))


def pair_key(name: str) -> tuple[str, ...]:
    """What two fields share that measure the same thing in different ways: pos_meas and vel_meas."""
    return tuple("" if w in ROLES else w for w in words(name))
