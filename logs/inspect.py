"""Inspect logs from the command line: what is in them, how regular they are, and what looks wrong.

`inspect` makes a `Report` of plain numbers, `show` prints it, `Report.to_json` gives it to programs, `run_inspect` does
all of it for files named on the command line.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import robots
from logs.data import Log
from logs.findings import findings_of
from logs.reader import open_log
from logs.report import LEVELS, ChannelReport, Level, Report, TopicReport, named_rate, report_topic
from robots.errors import UserError
from robots.spec import RobotSpec

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Report", "inspect", "run_inspect", "show"]

MAX_PROBLEMS = 20
"""Unreadable places listed in full; JSON lists all."""
STYLES: dict[Level, str] = {"fault": "red", "hint": "yellow", "info": "dim"}


def inspect(log: Log, spec: RobotSpec | None = None) -> Report:
    """Check every topic of a log, against the limits of a robot if `spec` is given."""
    reports = tuple(report_topic(t, spec, named_rate(log.path)) for t in log.topics.values())
    found = [f for r in reports for f in findings_of(r)]
    found.sort(key=lambda f: LEVELS.index(f.level))
    return Report(
        path=log.path,
        format=log.format,
        robot=spec.name if spec else None,
        info=log.info,
        topics=reports,
        findings=tuple(found),
        problems=log.problems,
        notes=log.notes,
    )


def show(report: Report, console: "Console") -> None:
    """Print a report as tables."""
    from rich.markup import escape

    limits = f", limits of {report.robot}" if report.robot else ""
    console.print(f"[bold]{escape(str(report.path))}[/bold] ({report.format}{limits})")
    if report.info:
        console.print(escape(", ".join(f"{k} {v}" for k, v in report.info.items())), style="dim")
    for topic in report.topics:
        console.print(f"\n[bold]{escape(topic.name)}[/bold] {topic.msgtype}, {_clock(topic)}", highlight=False)
        console.print(_timing_table(topic))
        if topic.channels:
            console.print(_channel_table(topic))
    console.print()
    for finding in report.findings:
        where = f"{finding.topic} {finding.field}".strip()
        console.print(f"[{STYLES[finding.level]}]{finding.level:5}[/] {escape(where)}: {escape(finding.text)}")
    for note in report.notes:
        console.print(f"[dim]note [/] {escape(note)}")
    for problem in report.problems[:MAX_PROBLEMS]:
        console.print(f"[bold red]UNREADABLE[/] {escape(problem)}")
    if len(report.problems) > MAX_PROBLEMS:
        console.print(f"[bold red]UNREADABLE[/] and {len(report.problems) - MAX_PROBLEMS} more places")


def _clock(topic: TopicReport) -> str:
    return {"none": "no stamps", "file name": "rate from the file name"}.get(topic.clock, f"{topic.clock} stamps")


def _timing_table(topic: TopicReport) -> Any:
    table = _table("count", "length", "rate", "period p1..p99", "std", "gaps", "back", "same", "received")
    table.add_row(str(topic.count), *_timing_cells(topic))
    return table


def _table(*headings: str) -> Any:
    """A table whose first column gives way where the terminal is narrow."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _timing_cells(topic: TopicReport) -> list[str]:
    timing = topic.timing
    if timing is None:
        return ["-"] * 8
    return [
        f"{timing.duration:.2f} s",
        f"{timing.rate:.4g} Hz",
        f"{timing.period_p1 * 1e3:.2f}..{timing.period_p99 * 1e3:.2f} ms",
        f"{timing.period_std * 1e3:.2f} ms",
        str(timing.gaps),
        str(timing.backwards),
        str(timing.duplicates),
        f"{topic.offset.median * 1e3:+.4g} ms" if topic.offset else "-",
    ]


def _channel_table(topic: TopicReport) -> Any:
    from rich.markup import escape

    table = _table("field", "n", "smallest", "largest", "nan/inf", "constant", "extreme", "held", "clock")
    for channel in topic.channels:
        unit = f" [{channel.unit}]" if channel.unit else ""
        table.add_row(escape(channel.field + unit), *_channel_cells(channel, topic))
    return table


def _channel_cells(channel: ChannelReport, topic: TopicReport) -> list[str]:
    """Elements, range, and how many elements have each fault; the clock is the ratio of implied to labelled time."""
    finite = [(e.minimum, e.maximum) for e in channel.elements if math.isfinite(e.minimum)]
    nan, inf = sum(e.nan for e in channel.elements), sum(e.inf for e in channel.elements)
    ratio = topic.clock_ratios.get(channel.field)
    counts = (sum(e.constant for e in channel.elements), sum(bool(e.saturation) for e in channel.elements))
    return [
        str(len(channel.elements)),
        f"{min(low for low, _ in finite):.4g}" if finite else "-",
        f"{max(high for _, high in finite):.4g}" if finite else "-",
        f"{nan}/{inf}" if nan or inf else "-",
        *(str(c) if c else "-" for c in counts),
        f"{channel.held.rows} rows" if channel.held else "-",
        f"{ratio.ratio:.3f}" if ratio and topic.clock != "none" else "-",
    ]


def run_inspect(
    files: Sequence[Path],
    robot: str | None = None,
    as_json: bool = False,
    plot: Path | None = None,
    console: "Console | None" = None,
) -> int:
    """Inspect logs and print what was found; one that can't be read does not stop the others.

    Args:
        files: Logs: rosbag2 directories, .mcap, .db3, .csv, .json.
        robot: Robot whose limits to compare with; by default the one a log names itself.
        as_json: Print one JSON list with an object per log instead of tables.
        plot: PNG file for an overview of the channels over time; of several logs each gets its own, with the log's
            name appended.
        console: Where tables go; standard output by default.

    Returns:
        0 if every file could be read in full, else 1.

    Raises:
        UnknownNameError: There is no such robot.
    """
    from rich.console import Console

    console = console or Console()
    spec = robots.load(robot) if robot else None
    documents: list[dict[str, Any]] = []
    complete = True
    for file in files:
        try:
            log = open_log(file)
            report = inspect(log, spec or _own_robot(log))
            if plot is not None:
                _plot(log, report, plot if len(files) == 1 else plot.with_stem(f"{plot.stem}_{file.stem}"))
        except UserError as error:
            complete = False
            documents.append({"path": str(file), "complete": False, "error": str(error)})
            if not as_json:
                console.print(f"{error}", style="bold red", markup=False)
            continue
        complete &= report.complete
        documents.append(report.to_json())
        if not as_json:
            show(report, console)
    if as_json:
        print(json.dumps(documents, indent=2, allow_nan=False))
    return 0 if complete else 1


def _own_robot(log: Log) -> RobotSpec | None:
    name = log.info.get("robot")
    return robots.load(name) if name in robots.names() else None


def _plot(log: Log, report: Report, target: Path) -> None:
    from logs.plot import save_overview

    save_overview(log, report, target)
