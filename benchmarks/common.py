"""What every benchmark shares: --quick and --record, the printed table, the JSON on the last line, the recorded page.

    @dataclass(frozen=True, kw_only=True)
    class Config(Benchmark): ...

    def main(config: Config) -> None:
        finish(config, "env_throughput", results)

    run(main, Config)

`--record` writes docs/benchmarks/NAME.json (the results with commit, date, machine, command and seeds) and draws
docs/benchmarks/NAME.md anew, with a table and a picture. `--quick` is a smaller measurement, never recorded.
"""

import datetime
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import tyro

from robots.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "benchmarks"
VERSIONS = ("mujoco", "numpy", "onnxruntime", "torch")
"""Packages whose versions belong to the machine's description, where they are installed."""
PIPE_WIDTH = 200

Picture = Callable[[Mapping[str, Any], Path], None]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table, printed and put into the recorded page."""

    title: str = ""
    """Line above it."""
    headings: tuple[str, ...]
    """Names of the columns."""
    rows: Sequence[Sequence[str]]
    """Cells, row by row."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Options of every benchmark."""

    quick: bool = False
    """A smaller measurement, for a first look and for continuous integration."""
    record: bool = False
    """Write the results to docs/benchmarks."""

    def __post_init__(self) -> None:
        """Refuse to record a quick measurement."""
        if self.quick and self.record:
            raise UserError("a --quick measurement is not recorded: leave out --quick or --record")


Config = TypeVar("Config", bound=Benchmark)


def run(main: Callable[[Config], None], config: type[Config]) -> None:
    """Call `main` with what the command line asks for; an error a person can act on is one sentence and exit code 1."""
    try:
        main(tyro.cli(config))
    except UserError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def finish(
    config: Benchmark,
    name: str,
    results: Mapping[str, Any],
    *,
    seeds: Sequence[int] = (0,),
    tables: Sequence[Table] = (),
    picture: Picture | None = None,
    text: str = "",
    folder: Path = FOLDER,
) -> dict[str, Any]:
    """Print the results as a table and, on the last line, as one JSON object; record them if asked to.

    Args:
        config: Options of this run.
        name: Name of the benchmark and of what is recorded.
        results: JSON values, nested as the benchmark likes; not-a-number becomes null.
        seeds: Seeds that were used.
        tables: What to print and to show on the recorded page; by default all results, one a row.
        picture: Draws the results into a PNG file; by default the top-level numbers as bars.
        text: Markdown that explains the figures, for the recorded page.
        folder: Where records go.

    Returns: what was printed on the last line.
    Raises: UserError if the record cannot be written.
    """
    plain = {k: _plain(v) for k, v in results.items()}
    tables = tables or [Table(headings=("key", "value"), rows=[(k, short(v)) for k, v in leaves(plain)])]
    _print_tables(name, tables)
    document = {**describe_run(seeds), **plain} if config.record else plain
    if config.record:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (picture or draw_bars)(plain, folder / f"{name}.png")
            (folder / f"{name}.md").write_text(page(name, document, tables, text))
            (folder / f"{name}.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise UserError(f"cannot write the record in {folder}: {error.strerror or error}") from error
    print(json.dumps(document, allow_nan=False))
    return document


def describe_run(seeds: Sequence[int]) -> dict[str, Any]:
    """Commit, date, machine, command and seeds of this run."""
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "seeds": list(seeds),
    }


def commit() -> str:
    """Commit of the working tree, with "+changes" if it differs; "unknown" outside git."""
    try:
        head, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changes else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout.strip()


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system and versions."""
    installed = {d.metadata["Name"].lower() for d in metadata.distributions() if d.metadata["Name"]}
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in VERSIONS if package in installed},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def page(name: str, document: Mapping[str, Any], tables: Sequence[Table], text: str) -> str:
    """The recorded page in Markdown."""
    m = document["machine"]
    versions = ", ".join(f"{k} {m[k]}" for k in ("python", *VERSIONS) if k in m)
    head, plus, changes = document["commit"].partition("+")
    lines = [
        f"# {name}",
        "",
        *([text.strip(), ""] if text.strip() else []),
        f"Recorded {document['date']} at commit `{head[:12]}{plus}{changes}` on {m['cores']} x {m['processor']},",
        f"{m['memory_gib']} GiB, {m['system']} ({versions}; load {m['load']} at the end).",
        f"This page is drawn by `--record`, not by hand; every figure stands in [{name}.json]({name}.json).",
        "",
        f"    {document['command']}",
        "",
        f"![{name}]({name}.png)",
        "",
    ]
    for table in tables:
        lines += [*([f"**{table.title}**", ""] if table.title else []), *_markdown(table), ""]
    return "\n".join(lines)


def _markdown(table: Table) -> list[str]:
    rows = [table.headings, ["---"] * len(table.headings), *table.rows]
    return [f"| {' | '.join(c.replace('|', chr(92) + '|') for c in row)} |" for row in rows]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of each leaf; lists are leaves."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def draw_bars(results: Mapping[str, Any], path: Path) -> None:
    """Top-level numbers above zero as bars on a logarithmic axis, one below the other, with their values."""
    from matplotlib.figure import Figure

    bars = [(k, float(v)) for k, v in results.items() if _is_number(v) and v > 0][::-1]
    figure = Figure(figsize=(8, 0.8 + 0.35 * max(1, len(bars))), layout="constrained")
    axis = figure.subplots()
    axis.barh([k for k, _ in bars], [v for _, v in bars], color="#2563eb", height=0.6)
    for i, (_, value) in enumerate(bars):
        axis.text(value, i, f" {value:,.0f}" if value >= 1000 else f" {value:.4g}", va="center", fontsize=9)
    axis.set_xscale("log")
    axis.margins(x=0.15)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _print_tables(name: str, tables: Sequence[Table]) -> None:
    from rich import table as rich_table
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    for table in tables:
        title = f"{name}: {table.title}" if table.title else name
        printed = rich_table.Table(*table.headings, box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
        for row in table.rows:
            printed.add_row(*map(Text, row))
        console.print(printed)


def short(value: Any) -> str:
    """A JSON value in few characters."""
    if isinstance(value, list):
        return f"[{', '.join(short(v) for v in value)}]"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "null" if value is None else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """The value as JSON knows it: tuples as lists, NumPy's numbers as Python's, what is no number as null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
