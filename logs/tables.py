"""Logs that are tables: CSV with a header row, and the JSON of motor benches (`{"entries": [{...}, ...]}`).

Columns whose names differ in one number or in a trailing x, y, z, w form one channel: `jpos0` to `jpos11` become the
channel `jpos` with elements 0 to 11. The time column is found by name; its unit comes from the name or is guessed from
the size of its steps, which is then said. A table without one has no stamps.
"""

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logs.bags import LATEST_NS, Findings
from logs.data import Channel, Stamps, Topic
from robots.errors import UserError

TIME_NAMES = {"time", "t", "timestamp", "stamp", "sec", "seconds", "secs"}
UNIT_NS = {
    "s": 10**9,
    "sec": 10**9,
    "secs": 10**9,
    "seconds": 10**9,
    "ms": 10**6,
    "msec": 10**6,
    "us": 10**3,
    "usec": 10**3,
    "µs": 10**3,
    "ns": 1,
    "nsec": 1,
}
"""Nanoseconds in a time unit, by the names columns give it."""
EPOCH = ((1e17, "ns"), (1e14, "us"), (1e11, "ms"), (1e8, "s"))
"""Dates since 2001 counted from 1970, in each unit, are larger than this."""
STEPS = ((1e5, "ns"), (2e2, "us"), (0.9, "ms"), (0.0, "s"))
"""Median steps larger than this, in a column that does not count from 1970, are taken for this unit."""
MISSING = {"", "nan", "na", "n/a", "none", "null", "-"}
MOSTLY = 0.9
"""A column with a larger share of text than this is a text column, not a damaged one."""
EXAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Named columns of cells, as text or JSON values."""

    names: list[str]
    rows: list[Sequence[Any]]
    numbers: list[int]
    """Line or entry number of each row, for messages."""


def read_csv(path: Path, found: Findings) -> dict[str, Topic]:
    """A CSV file as one topic named after it. Raises UserError if it holds no table of numbers."""
    raw = path.read_bytes()
    if b"\x00" in raw[:4096]:
        raise UserError(f"{path} is binary and none of the formats that can be read (MCAP, sqlite3, CSV, JSON)")
    text = raw.decode("utf-8-sig", errors="replace")
    if "\ufffd" in text:
        found.problems.append(f"{path.name}: {text.count(chr(0xFFFD))} bytes are no UTF-8 text")
    table = _csv_table(text, path, found)
    return {path.stem: _topic(path.stem, "csv", table, found)}


def _csv_table(text: str, path: Path, found: Findings) -> _Table:
    first = text.partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    lines = _cells(csv.reader(StringIO(text, newline=""), delimiter=delimiter), path, found)
    number, header = next(lines, (0, []))
    rows = [(n, r) for n, r in lines if r]
    if any(_is_number(c) for c in header):
        found.notes.append(f"{path.name} has no header row: its columns are called column0, column1, ...")
        rows.insert(0, (number, header))
        header = [f"column{i}" for i in range(len(header))]
    names = _unique([c.strip().removeprefix("-").strip() for c in header])
    ragged = [n for n, r in rows if len(r) != len(names)]
    if ragged:
        found.problems.append(
            f"{path.name}: {len(ragged)} rows do not have {len(names)} cells and are left out ({_lines(ragged)})"
        )
    whole = [(n, r) for n, r in rows if len(r) == len(names)]
    if not names or not any(_is_number(c) for _, r in whole for c in r):
        raise UserError(f"{path} holds no table of numbers: expected a header row and rows of numbers below it")
    return _Table(names=names, rows=[r for _, r in whole], numbers=[n for n, _ in whole])


def _cells(reader: Any, path: Path, found: Findings) -> Iterator[tuple[int, list[str]]]:
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        found.problems.append(f"{path.name} can't be read beyond line {reader.line_num}: {error}")


def read_json(path: Path, found: Findings) -> dict[str, Topic]:
    """A bench log as one topic named after the file; other top-level numbers and texts go to `found.info`.

    Raises UserError if there are no entries.
    """
    text = path.read_bytes().decode("utf-8-sig", errors="replace")
    try:
        content: Any = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        content = _salvaged(text)
        count = len(content["entries"])
        found.problems.append(f"{path.name} is damaged ({error}): the first {count} entries could be read")
    entries = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not any(isinstance(e, dict) for e in entries):
        raise UserError(f'{path} is JSON without "entries": expected {{"entries": [{{"timestamp": ...}}, ...]}}')
    found.info.update({k: str(v) for k, v in content.items() if isinstance(v, str | int | float)})
    sound = [(i, e) for i, e in enumerate(entries) if isinstance(e, dict)]
    if len(sound) < len(entries):
        found.problems.append(f"{path.name}: {len(entries) - len(sound)} entries are no objects and are left out")
    names = list(dict.fromkeys(k for _, e in sound for k in e))
    rows: list[Sequence[Any]] = [[e.get(n) for n in names] for _, e in sound]
    return {path.stem: _topic(path.stem, "json", _Table(names=names, rows=rows, numbers=[i for i, _ in sound]), found)}


def _salvaged(text: str) -> dict[str, Any]:
    """What stands before the fault: settings and whole entries."""
    before, start, after = text.partition('"entries"')
    entries: list[Any] = []
    decoder = json.JSONDecoder()
    at = after.find("[") + 1
    while start and at:
        at += len(after[at:]) - len(after[at:].lstrip(" \t\r\n,"))
        try:
            entry, at = decoder.raw_decode(after, at)
        except (json.JSONDecodeError, RecursionError):
            break
        entries.append(entry)
    settings = re.findall(r'"(\w+)"\s*:\s*("[^"\\]*"|-?[0-9][0-9.eE+-]*)', before)
    return {**{k: v.strip('"') for k, v in settings}, "entries": entries}


def _topic(name: str, kind: str, table: _Table, found: Findings) -> Topic:
    stamps, time_column, kept = _stamps(name, table, found)
    rows, numbers = [table.rows[i] for i in kept], [table.numbers[i] for i in kept]
    columns: dict[str, NDArray[np.float64]] = {}
    for i, column in enumerate(table.names):
        if i != time_column:
            values = _numbers(name, column, [r[i] for r in rows], numbers, found)
            if values is not None:
                columns[column] = values
    return Topic(
        name=name, msgtype=kind, count=len(rows), channels={c.field: c for c in _channels(columns)}, header_ns=stamps
    )


def _stamps(name: str, table: _Table, found: Findings) -> tuple[Stamps | None, int | None, list[int]]:
    """Stamps [ns], the index of their column and the rows that have one."""
    everything = list(range(len(table.rows)))
    column = next((i for i, n in enumerate(table.names) if _is_time(n)), None)
    if column is None:
        found.notes.append(f"{name} has no time column: there are no stamps, and rates can't be told")
        return None, None, everything
    cells = [_decimal(r[column]) for r in table.rows]
    numbers = [c for c in cells if c is not None]
    if not numbers:
        found.problems.append(f"{name}: the time column '{table.names[column]}' holds no numbers: there are no stamps")
        return None, column, everything
    unit = UNIT_NS[_time_unit(table.names[column], numbers, found)]
    # Decimal text to integer nanoseconds: a float would round dates to a quarter of a microsecond.
    stamps = {i: int((c * unit).to_integral_value()) for i, c in enumerate(cells) if c is not None}
    stamps = {i: s for i, s in stamps.items() if abs(s) <= LATEST_NS}
    bad = [table.numbers[i] for i in everything if i not in stamps]
    if bad:
        found.problems.append(f"{name}: {len(bad)} rows have no time and are left out ({_lines(bad)})")
    return np.array(list(stamps.values()), dtype=np.int64), column, list(stamps)


def _is_time(name: str) -> bool:
    words = _words(name)
    return bool(words) and words[0] in TIME_NAMES and all(w in UNIT_NS or w in TIME_NAMES for w in words)


def _words(name: str) -> list[str]:
    return [w for w in re.split(r"[^0-9a-zµ]+", name.lower()) if w]


def _time_unit(name: str, times: list[Decimal], found: Findings) -> str:
    named = [w for w in _words(name) if w in UNIT_NS]
    if named:
        return named[-1]
    values = np.array([float(t) for t in islice(times, 10_000)])
    usual = float(np.median(np.abs(values)))
    steps = np.abs(np.diff(values))
    step = float(np.median(steps[steps > 0])) if np.any(steps > 0) else 0.0
    for limit, unit in EPOCH:
        if usual > limit:
            found.notes.append(f"time column '{name}' taken for {unit} since 1970: its median is {usual:.4g}")
            return unit
    unit = next(u for limit, u in STEPS if step > limit or not limit)
    found.notes.append(f"time column '{name}' taken for {unit}: its median step is {step:.4g}")
    return unit


def _decimal(cell: Any) -> Decimal | None:
    """The cell as an exact number, or None."""
    try:
        value = Decimal(repr(cell) if isinstance(cell, float) else str(cell).strip())
    except InvalidOperation:
        return None
    return value if value.is_finite() and abs(value) <= LATEST_NS else None


def _numbers(
    name: str, column: str, cells: list[Any], numbers: list[int], found: Findings
) -> NDArray[np.float64] | None:
    """A column as floats with NaN for what is missing; None for a column of text."""
    values = np.full(len(cells), np.nan)
    bad: list[int] = []
    empty = 0
    for i, cell in enumerate(cells):
        try:
            values[i] = float(cell)
        except (TypeError, ValueError):
            if cell is None or str(cell).strip().lower() in MISSING:
                empty += 1
            else:
                bad.append(i)
    if bad and len(bad) > MOSTLY * (len(cells) - empty):
        found.notes.append(f"{name}: column '{column}' holds text and is left out")
        return None
    if bad:
        shown = ", ".join(f"{str(cells[i])[:20]!r}" for i in bad[:EXAMPLES])
        where = _lines([numbers[i] for i in bad])
        found.problems.append(f"{name}: {len(bad)} cells of '{column}' are no numbers ({shown}; {where}): NaN there")
    if empty:
        found.notes.append(f"{name}: {empty} cells of '{column}' are empty: NaN there")
    return values


def _channels(columns: dict[str, NDArray[np.float64]]) -> list[Channel]:
    """Columns grouped into channels, in order of first appearance."""
    groups: dict[tuple[str, str | None], list[tuple[str, str]]] = {}
    vectors = _vector_stems(list(columns))
    for column in columns:
        bare, unit = _unit(column)
        stem, element = _split(bare, vectors)
        groups.setdefault((stem, unit), []).append((element, column))
    result = []
    taken: set[str] = set()
    for (stem, unit), members in groups.items():
        if len(members) == 1:
            stem, members = _unit(members[0][1])[0], [("", members[0][1])]
        while stem in taken:
            stem += "'"
        taken.add(stem)
        values = np.stack([columns[c] for _, c in members], axis=1)
        result.append(Channel(field=stem, names=tuple(e for e, _ in members), values=values, unit=unit))
    return result


def _unit(column: str) -> tuple[str, str | None]:
    """Name and unit of a heading such as `torque [Nm]`."""
    match = re.fullmatch(r"(.*?)\s*[\[(]([^\])]+)[\])]\s*", column)
    return (match[1], match[2]) if match and match[1] else (column, None)


def _vector_stems(columns: list[str]) -> set[str]:
    """Stems that stand with x, y and z at least."""
    ends: dict[str, set[str]] = {}
    for column in columns:
        match = re.fullmatch(r"(.*?)[_. ]?([wxyz])", _unit(column)[0])
        if match:
            ends.setdefault(match[1], set()).add(match[2])
    return {stem for stem, letters in ends.items() if {"x", "y", "z"} <= letters}


def _split(column: str, vectors: set[str]) -> tuple[str, str]:
    """Common part and element of a column name: jpos3_des is jpos_des, 3; gyro_x is gyro, x."""
    vector = re.fullmatch(r"(.*?)[_. ]?([wxyz])", column)
    if vector and vector[1] in vectors:
        return vector[1] or "vector", vector[2]
    numbered = re.fullmatch(r"(\D*)(\d+)(\D*)", column)
    if numbered:
        # arm_3_position is arm_position: one separator goes with the number.
        before, after = numbered[1], numbered[3]
        if before[-1:] in "_. " and after[:1] in "_. " and before and after:
            after = after[1:]
        return (before + after).strip("_. ") or "column", numbered[2]
    return column, ""


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return cell.strip().lower() not in MISSING


def _unique(names: list[str]) -> list[str]:
    """Names with an appended count where one comes up again, and a name for the nameless."""
    seen: dict[str, int] = {}
    result = []
    for i, name in enumerate(names):
        base = name or f"column{i}"
        seen[base] = seen.get(base, 0) + 1
        result.append(base if seen[base] == 1 else f"{base}({seen[base]})")
    return result


def _lines(numbers: list[int]) -> str:
    more = ", ..." if len(numbers) > EXAMPLES else ""
    return f"at {', '.join(str(n) for n in numbers[:EXAMPLES])}{more}"
