"""One page that shows a log at a glance. Importing this needs matplotlib."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from logs.checks import as_float
from logs.data import Channel, Log, Topic
from logs.report import Report, TopicReport
from robots.errors import UserError

MAX_STRIPS = 12
"""Channels on the page; the first of each topic come first."""
MAX_LINES = 30
"""Elements drawn in one strip."""
MAX_LEGEND = 8
"""Channels with more elements get no legend."""
MAX_POINTS = 4000
"""Points drawn of one line; longer ones are thinned to the extremes of equal stretches."""
STRIP_HEIGHT = 1.15
WIDTH = 12.0
GAP_COLOUR = "#d62728"


def save_overview(log: Log, report: Report, path: Path) -> None:
    """Save a PNG with one strip per channel over time, gaps in red. Raises UserError if it can't be written."""
    strips = _strips(log)
    if not strips:
        raise UserError(f"{log.path} holds no numbers to draw")
    left_out = sum(len(t.channels) for t in log.topics.values()) - len(strips)
    topics = {t.name: t for t in report.topics}
    with mpl.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(WIDTH, 0.9 + STRIP_HEIGHT * len(strips)), layout="constrained")
        axes = figure.subplots(len(strips), 1, squeeze=False)[:, 0]
        # Strips share the time axis only where all of them have stamps; rows and seconds don't mix.
        starts = [int(t.stamp_ns[0]) for t, _ in strips if t.stamp_ns is not None and len(t.stamp_ns)]
        origin = min(starts) if len(starts) == len(strips) else None
        for axis, (topic, channel) in zip(axes, strips, strict=True):
            _strip(axis, topic, channel, topics[topic.name], origin)
            if origin is not None:
                axis.sharex(axes[0])
        more = f", {left_out} more not shown (constant, or beyond the first {MAX_STRIPS})" if left_out else ""
        figure.suptitle(f"{log.path.name}: {len(strips)} channels{more}; red: gaps", fontsize=9)
        axes[-1].set_xlabel("row" if strips[-1][0].stamp_ns is None else "time [s]")
        try:
            figure.savefig(path, dpi=110)
        except OSError as error:
            raise UserError(f"cannot save the picture {path}: {error.strerror}") from error


def _strips(log: Log) -> list[tuple[Topic, Channel]]:
    """Channels to draw: round by round one of each topic, without those that never change."""
    queues = [[(t, c) for c in t.channels.values() if _moves(c)] for t in log.topics.values()]
    rounds = max((len(q) for q in queues), default=0)
    chosen = [q[i] for i in range(rounds) for q in queues if i < len(q)][:MAX_STRIPS]
    order = {id(c): (n, i) for n, q in enumerate(queues) for i, (_, c) in enumerate(q)}
    return sorted(chosen, key=lambda strip: order[id(strip[1])])


def _moves(channel: Channel) -> bool:
    values = as_float(channel.values)
    return len(values) > 0 and bool((values != values[0]).any())


def _strip(axis: Axes, topic: Topic, channel: Channel, report: TopicReport, origin: int | None) -> None:
    stamps = topic.stamp_ns
    time = np.arange(topic.count, dtype=np.float64) if stamps is None else (stamps - (origin or stamps[0])) * 1e-9
    for name, values in zip(channel.names, as_float(channel.values).T[:MAX_LINES], strict=False):
        axis.plot(*_thinned(time, values), linewidth=0.7, label=name)
        missing = time[~np.isfinite(values)]
        axis.plot(missing, np.zeros_like(missing), "|", color=GAP_COLOUR, markersize=6)
    if stamps is not None and report.timing is not None:
        steps = np.diff(stamps) * 1e-9
        for i in np.flatnonzero(steps > report.timing.gap_threshold):
            # The edge keeps a gap visible that is narrower than a pixel.
            axis.axvspan(time[i], time[i + 1], color=GAP_COLOUR, alpha=0.3, linewidth=1)
    unit = f" [{channel.unit}]" if channel.unit else ""
    more = f" (first {MAX_LINES} of {len(channel.names)})" if len(channel.names) > MAX_LINES else ""
    axis.set_title(f"{topic.name} {channel.field}{unit}{more}", loc="left", fontsize=8, pad=2)
    axis.margins(x=0.005)
    if 1 < len(channel.names) <= MAX_LEGEND:
        axis.legend(loc="upper right", fontsize=6, ncols=len(channel.names), frameon=False)


def _thinned(time: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both, with only the smallest and largest sample of each of equally many rows, so that no spike is lost."""
    if len(time) <= MAX_POINTS:
        return time, values
    stretch = -(-len(time) // (MAX_POINTS // 2))
    starts = np.arange(0, len(time), stretch)
    finite = np.where(np.isfinite(values), values, np.nan)
    kept = set()
    for start in starts:
        part = finite[start : start + stretch]
        if np.isfinite(part).any():
            kept |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
    index = np.array(sorted(kept), dtype=np.intp)
    return time[index], values[index]
