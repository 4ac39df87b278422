"""One HTML page about a policy or a run: scores against targets, what it does, how it learnt; nothing else is needed.

    write_report("policy.onnx", Path("report.html"))
    write_report("runs/velocity-ppo", Path("report.html"), log=Path("walk_log"))     # with learning curves and a log

Pictures and the video stand inside the page. Scores are those in the policy's contract unless others are given. Needs
matplotlib, tensorboard for learning curves, and what `policies.play` needs for pictures; all are imported late.
"""

import base64
import html
import importlib
import io
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

from logs.inspect import inspect
from logs.reader import open_log
from policies.contract import PolicyContract, describe, load_policy
from policies.evaluate import (
    TARGETS,
    UNITS,
    Estimate,
    Evaluation,
    find_target,
    format_estimate,
    policy_file,
    scores,
)
from policies.play import Phase, PictureConfig, Recording, save_strip, save_video, simulate
from robots.errors import UserError
from robots.spec import RobotSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

Array = NDArray[Any]

TOUR = (
    Phase(at=0.0, command=(0.0, 0.0, 0.0)),
    Phase(at=1.5, command=(0.7, 0.0, 0.0)),
    Phase(at=5.0, command=(1.0, 0.0, 0.4)),
    Phase(at=8.5, command=(0.0, 0.3, 0.0)),
    Phase(at=11.0, command=(0.0, 0.0, 0.6)),
    Phase(at=14.0, command=(0.0, 0.0, 0.0)),
)
"""Commands of the walk that a report shows."""
TOUR_SECONDS = 16.0
CONTACT = 5.0
"""A foot stands where the ground pushes it with more than this [N]."""
GAIT_WINDOW = 4.0
"""Part of the walk that the gait diagram shows [s]."""
CURVES = {
    "episode/return": "return of an episode",
    "episode/length": "length of an episode [steps]",
    "episode/survival": "episodes without a fall",
    "reward/track_linear": "linear tracking in [0, 1]",
    "reward/track_turn": "turn tracking in [0, 1]",
    "curriculum/level": "curriculum level",
    "policy/std": "action standard deviation",
    "speed/steps_per_second": "environment steps/s",
}
"""Learning curves that are drawn where a run has them, and their titles."""
INK, BLUE, ORANGE, GREY = "#1f2933", "#2563eb", "#ea580c", "#9aa5b1"


def write_report(
    path: str | Path,
    out: Path,
    *,
    evaluation: Evaluation | None = None,
    perturbed: Mapping[str, Evaluation] | None = None,
    recording: Recording | None = None,
    log: Path | None = None,
    video: bool | Path = True,
    title: str = "",
) -> Path:
    """Write the page; returns `out`.

    Args:
        path: Policy file, or a run folder: its learning curves are shown then.
        out: HTML file to write.
        evaluation: Scores to show instead of those in the contract.
        perturbed: Scores of perturbed plants that belong to it.
        recording: Walk to show; by default the policy walks the TOUR.
        log: Recorded log to inspect.
        video: Whether to draw the video, which takes most of the time, or an MP4 of the recording to show instead.
        title: Heading; by default robot and task.

    Raises: ContractError and UserError as `policies.play.simulate` does, and UserError for a log that cannot be opened
        or a page that cannot be written.
    """
    contract, run = load_policy(policy_file(path)).contract, Path(path)
    recording = recording or simulate(path, seconds=TOUR_SECONDS, script=TOUR)
    tree = contract.evaluation if evaluation is None else scores(evaluation, perturbed)
    sections = [
        _summary(contract, recording, tree),
        _walk(recording, video),
        _scores(tree),
        _robustness(tree),
        _section("Commanded and achieved velocity", _png(velocity_figure(recording)), VELOCITY_NOTE),
        _section("Gait", _png(gait_figure(recording)), GAIT_NOTE),
        _section("Effort and speed of the joints against their limits", _png(load_figure(recording)), LOAD_NOTE),
        _learning(run) if run.is_dir() else "",
        _log(log, recording.spec) if log is not None else "",
        f"<details><summary>The whole contract</summary><pre>{html.escape(describe(contract))}</pre></details>",
    ]
    heading = html.escape(title or f"{contract.robot}: {contract.task}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(PAGE.format(title=heading, style=STYLE, body="\n".join(sections)))
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    return out


# ---- sections --------------------------------------------------------------------------------------------------------

VELOCITY_NOTE = "In the base frame. Thin: as it is at each control step; thick: averaged over a gait cycle."
GAIT_NOTE = (
    "Bars: the foot carries load. Lines: height of the ankles above their lowest point. Dotted: begin of the gait "
    "clock's cycle."
)
LOAD_NOTE = (
    "Share of the robot's limit, over the whole walk above. Bars: root mean square; ticks: 99th percentile, peak."
)


def _section(title: str, body: str, note: str = "") -> str:
    noted = f"<p class=note>{html.escape(note)}</p>" if note else ""
    return f"<section><h2>{html.escape(title)}</h2>{body}{noted}</section>"


def _summary(contract: PolicyContract, recording: Recording, tree: Mapping[str, object]) -> str:
    training, (lo, hi) = contract.training, contract.action_delay
    measured = [(t, v) for t in TARGETS if (v := _number(tree, t.scenario, t.metric)) is not None]
    reached = sum(t.met(v) for t, v in measured)
    verdict = f"{reached} of {len(measured)} targets reached" if measured else "not evaluated yet"
    walk = "no fall" if recording.fell_at is None else f"fell after {recording.fell_at:.2f} s"
    rows = (
        ("evaluation", verdict),
        ("walk on this page", f"{recording.time[-1] + recording.dt:.1f} s, {walk}"),
        ("robot", f"{contract.robot}, model {contract.model_hash[:12]}"),
        ("task", contract.task),
        ("learner", f"{training.algorithm}, {training.env_steps:,} environment steps, seed {training.seed}"),
        ("trained", f"{training.date}, commit {training.commit[:12]}"),
        ("dynamics", f"{contract.dynamics.source}, {len(contract.dynamics.randomization)} ranges drawn in training"),
        ("runs at", f"{contract.rate_hz:g} Hz; trained with an action delay of {lo * 1e3:g} to {hi * 1e3:g} ms"),
        ("reads", ", ".join(s.name for s in contract.inputs)),
        ("file", f"SHA-256 {recording.policy}"),
    )
    return _table((), rows)


def _walk(recording: Recording, video: bool | Path) -> str:
    body = ""
    with tempfile.TemporaryDirectory() as folder:
        if video:
            mp4 = video if isinstance(video, Path) else Path(folder) / "walk.mp4"
            if mp4 is not video:
                save_video(recording, mp4, config=PictureConfig(width=640, height=400))
            data = base64.b64encode(mp4.read_bytes()).decode()
            body += f'<video controls loop muted autoplay src="data:video/mp4;base64,{data}"></video>'
        png = Path(folder) / "walk.png"
        save_strip(recording, png)
        body += f'<img alt="pictures of the walk" src="{_data_uri(png.read_bytes())}">'
    return _section("The walk", body, "Pictures: 0.1 s apart, from the middle of the walk or around the fall.")


def _scores(tree: Mapping[str, object]) -> str:
    names = [n for n, m in tree.items() if isinstance(m, Mapping) and "survival" in m]
    if not names:
        return _section("Scores", "<p>This policy has not been evaluated: <code>tarsus evaluate POLICY</code>.</p>")
    rows = [
        (f"{metric} [{unit}]" if unit else metric, *(_score(tree, n, metric, unit) for n in names))
        for metric, unit in UNITS.items()
        if any(_number(tree, n, metric) is not None for n in names)
    ]
    protocol = tree.get("protocol")
    note = "Means over episodes with half the width of their 95 % intervals. Green: target reached, red: missed."
    if isinstance(protocol, Mapping):
        note += f" {protocol.get('episodes')} episodes of {protocol.get('seconds')} s, seed {protocol.get('seed')}."
    return _section("Scores", _table(("metric", *names), rows), note)


def _score(tree: Mapping[str, object], scenario: str, metric: str, unit: str) -> "str | _Cell":
    value, target = _number(tree, scenario, metric), find_target(scenario, metric)
    if value is None:
        return "-"
    interval = _entry(tree, scenario).get(f"{metric}_ci")
    lo, hi = interval if isinstance(interval, Sequence) and len(interval) == 2 else (None, None)
    text = format_estimate(Estimate(value=value, lo=lo, hi=hi), 100.0 if unit == "%" else 1.0)
    if target is None:
        return text
    sign = "≥" if target.bound == "at least" else "≤"
    return _Cell(text=text, css="good" if target.met(value) else "bad", note=f"{sign} {target.value:g}")


def _robustness(tree: Mapping[str, object]) -> str:
    entries = tree.get("robustness")
    if not isinstance(entries, Mapping) or not entries:
        return ""
    names = list(dict.fromkeys(s for e in entries.values() for s in e))
    rows = [(name, *(_survival_and_error(e, s) for s in names)) for name, e in entries.items()]
    note = "Survival, then e_vel [m/s], or drift [m/s] where the command is to stand."
    return _section("On plants unlike the nominal one", _table(("plant", *names), rows), note)


def _survival_and_error(tree: Mapping[str, object], scenario: str) -> str:
    survival = _number(tree, scenario, "survival")
    error = _number(tree, scenario, "drift")
    error = _number(tree, scenario, "e_vel") if error is None else error
    return "-" if survival is None or error is None else f"{survival:.3f} · {error:.3f}"


def _entry(tree: Mapping[str, object], scenario: str) -> Mapping[str, object]:
    entry = tree.get(scenario)
    return entry if isinstance(entry, Mapping) else {}


def _number(tree: Mapping[str, object], scenario: str, metric: str) -> float | None:
    value = _entry(tree, scenario).get(metric)
    return float(value) if isinstance(value, int | float) else None


def _learning(run: Path) -> str:
    curves = read_curves(run)
    if not curves:
        return _section("Learning curves", f"<p>No TensorBoard curves in {html.escape(str(run))}.</p>")
    return _section("Learning curves", _png(curves_figure(curves)), "Over environment steps; thick: smoothed.")


def _log(path: Path, spec: RobotSpec) -> str:
    from logs.plot import save_overview

    log = open_log(path)
    report = inspect(log, spec)
    topics = [
        (t.name, t.msgtype, str(t.count), f"{t.timing.rate:.4g} Hz" if t.timing else "-", str(len(t.channels)))
        for t in report.topics
    ]
    found = [(f.level, f"{f.topic} {f.field}".strip(), f.text) for f in report.findings]
    with tempfile.TemporaryDirectory() as folder:
        save_overview(log, report, Path(folder) / "log.png")
        picture = _data_uri((Path(folder) / "log.png").read_bytes())
    body = _table(("topic", "type", "messages", "rate", "fields"), topics)
    body += f"<details><summary>{len(found)} findings</summary>{_table(('level', 'where', 'what'), found)}</details>"
    body += f'<img alt="channels of the log" src="{picture}">'
    return _section(f"Recorded log {path.name}", body)


# ---- figures ---------------------------------------------------------------------------------------------------------


def velocity_figure(recording: Recording) -> "Figure":
    """Commanded and achieved forward, left and turn velocity over time."""
    s, time = recording.signals, recording.time
    achieved = np.column_stack([s["privileged.base_lin_vel"][:, :2], s["privileged.base_ang_vel"][:, 2]])
    window = max(1, round(recording.period / recording.dt))
    figure, axes = _figure(3, 5.2)
    for k, (axis, name) in enumerate(zip(axes, ("forward [m/s]", "left [m/s]", "turn left [rad/s]"), strict=True)):
        axis.plot(time, achieved[:, k], color=BLUE, alpha=0.3, linewidth=0.8)
        axis.plot(time, moving_average(achieved[:, k], window), color=BLUE, linewidth=1.8, label="achieved")
        axis.step(time, s["command"][:, k], where="post", color=INK, linewidth=1.2, linestyle="--", label="commanded")
        axis.set_ylabel(name)
        _mark_events(axis, recording)
    axes[0].legend(loc="upper right", ncols=2, frameon=False)
    axes[-1].set_xlabel("time [s]")
    return figure


def moving_average(values: Array, window: int) -> Array:
    """Means (T) over the `window` samples around each one; fewer at the ends."""
    ones = np.ones(min(window, len(values)))
    counts = np.convolve(np.ones(len(values)), ones, mode="same")
    return np.asarray(np.convolve(values, ones, mode="same") / counts)


def gait_figure(recording: Recording) -> "Figure":
    """Which foot stands when, and how high they are, over a few seconds in which the robot is asked to walk."""
    rows = gait_rows(recording)
    time, s = recording.time[rows], recording.signals
    stands = contacts(s["privileged.foot_force"][rows])
    height = s["privileged.foot_pos"][:, :, 2]
    height = (height - height.min(axis=0))[rows]
    figure, (bars, lines) = _figure(2, 3.6, heights=(1, 2))
    sides = ("left", "right")
    for foot, colour in enumerate((BLUE, ORANGE)):
        spans = [(time[a], (b - a) * recording.dt) for a, b in _runs(stands[:, foot])]
        bars.broken_barh(spans, (0.55 - foot, 0.8), color=colour)
        lines.plot(time, 100 * height[:, foot], color=colour, linewidth=1.4, label=sides[foot])
    bars.set_yticks([0.95, -0.05], sides)
    bars.set_ylim(-0.6, 1.5)
    wraps = time[1:][np.diff(recording.phase[rows]) < 0]
    for axis in (bars, lines):
        for t in wraps:
            axis.axvline(t, color=GREY, linewidth=0.8, linestyle=":")
        axis.set_xlim(time[0], time[-1] + recording.dt)
    lines.set_ylabel("height [cm]")
    lines.set_xlabel("time [s]")
    lines.legend(loc="upper right", ncols=2, frameon=False)
    return figure


def gait_rows(recording: Recording) -> slice:
    """The first GAIT_WINDOW of the recording that begins half a second after the robot is first asked to move."""
    moves = np.flatnonzero(np.any(recording.signals["command"] != 0, axis=1))
    length = round(GAIT_WINDOW / recording.dt)
    first = (int(moves[0]) + round(0.5 / recording.dt)) if len(moves) else 0
    first = max(0, min(first, len(recording.targets) - length))
    return slice(first, min(first + length, len(recording.targets)))


def contacts(force: Array) -> NDArray[np.bool_]:
    """Whether each foot stands (T, F), from the force of the ground on it (T, F, 3) [N]."""
    return np.asarray(np.linalg.norm(force, axis=-1) > CONTACT)


def _runs(on: Array) -> list[tuple[int, int]]:
    """First and one past the last row of each stretch of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], on, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def load_figure(recording: Recording) -> "Figure":
    """Effort and speed of every joint as a share of its limit: root mean square, 99th percentile and peak."""
    spec, s = recording.spec, recording.signals
    figure, axes = _figure(1, 0.6 + 0.2 * len(spec.joints), columns=2, share_x=False)
    panels = (("effort", "joint_effort", "effort_limit"), ("speed", "joint_vel", "vel_limit"))
    for axis, (name, signal, limit) in zip(axes, panels, strict=True):
        share = np.abs(s[f"privileged.{signal}"]) / spec.array(limit)
        places = np.arange(len(spec.joints))[::-1]
        axis.barh(places, np.sqrt((share**2).mean(axis=0)), height=0.6, color=BLUE)
        axis.plot(np.percentile(share, 99, axis=0), places, "|", color=INK, markersize=9)
        axis.plot(share.max(axis=0), places, "|", color=ORANGE, markersize=9, markeredgewidth=2)
        axis.axvline(1.0, color="#dc2626", linewidth=1)
        axis.set_yticks(places, [n.removesuffix("_joint") for n in spec.joint_names] if axis is axes[0] else [])
        axis.set_ylim(-0.7, len(places) - 0.3)
        axis.set_xlim(0, max(1.05, float(share.max()) * 1.05))
        axis.set_xlabel(f"{name} / limit")
    return figure


def read_curves(run: Path) -> dict[str, tuple[Array, Array]]:
    """Steps and values of every scalar curve in a run folder's TensorBoard files; empty without files.

    Raises UserError where there are files but no tensorboard to read them.
    """
    if not any(run.glob("events.out.tfevents.*")):
        return {}
    try:
        module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    except ModuleNotFoundError as error:
        raise UserError("learning curves need tensorboard: pip install tensorboard") from error
    accumulator = module.EventAccumulator(str(run), size_guidance={"scalars": 0})
    accumulator.Reload()
    curves = {}
    for tag in accumulator.Tags()["scalars"]:
        events = accumulator.Scalars(tag)
        curves[tag] = (np.array([e.step for e in events]), np.array([e.value for e in events]))
    return curves


def curves_figure(curves: Mapping[str, tuple[Array, Array]]) -> "Figure":
    """Small panels of the known CURVES, or of the first eight where none of them is there."""
    chosen = [t for t in CURVES if t in curves] or sorted(curves)[: len(CURVES)]
    columns = min(4, len(chosen))
    figure, axes = _figure(-(-len(chosen) // columns), 2.0 * -(-len(chosen) // columns), columns=columns, share_x=False)
    for axis, tag in zip(axes, chosen, strict=False):
        steps, values = curves[tag]
        axis.plot(steps / 1e6, values, color=BLUE, alpha=0.3, linewidth=0.8)
        axis.plot(steps / 1e6, moving_average(values, max(1, len(values) // 30)), color=BLUE, linewidth=1.6)
        axis.set_title(CURVES.get(tag, tag), loc="left", fontsize=8)
        axis.set_xlabel("steps [millions]")
    for axis in axes[len(chosen) :]:
        axis.set_visible(False)
    return figure


def _mark_events(axis: "Axes", recording: Recording) -> None:
    for t in recording.push_at:
        axis.axvline(t, color=ORANGE, linewidth=1)
    if recording.fell_at is not None:
        axis.axvline(recording.fell_at, color="#dc2626", linewidth=1.5)


def _figure(
    rows: int, height: float, *, columns: int = 1, heights: Iterable[float] | None = None, share_x: bool = True
) -> "tuple[Figure, list[Axes]]":
    """A figure with panels, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, height), layout="constrained")
    ratios = None if heights is None else list(heights)
    axes = figure.subplots(rows, columns, sharex=share_x, squeeze=False, height_ratios=ratios).ravel().tolist()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.xaxis.label.set_fontsize(9)
        axis.yaxis.label.set_fontsize(9)
        axis.margins(x=0.01)
    return figure, axes


# ---- HTML ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Cell:
    text: str
    css: str
    note: str


def _table(headings: Sequence[str], rows: Iterable[Sequence[str | _Cell]]) -> str:
    head = "".join(f"<th>{html.escape(h)}</th>" for h in headings)
    body = "".join(f"<tr>{''.join(_td(c) for c in row)}</tr>" for row in rows)
    return f"<div class=wide><table>{f'<tr>{head}</tr>' if head else ''}{body}</table></div>"


def _td(cell: str | _Cell) -> str:
    if isinstance(cell, _Cell):
        return f"<td class={cell.css}>{html.escape(cell.text)}<br><small>target {html.escape(cell.note)}</small></td>"
    return f"<td>{html.escape(cell)}</td>"


def _png(figure: "Figure") -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return f'<img alt="" src="{_data_uri(buffer.getvalue())}">'


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><h1>{title}</h1>
{body}
</body></html>
"""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 1000px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.6em } h2 { font-size: 1.15em; margin: 2em 0 .5em; border-bottom: 1px solid #d5dbe1 }
img, video { max-width: 100%; display: block; margin: .5em 0; border-radius: 4px }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .88em }
td, th { text-align: left; padding: .2em .9em .2em 0; vertical-align: top; font-variant-numeric: tabular-nums }
th { border-bottom: 1px solid #9aa5b1 } td:first-child { color: #52606d; white-space: nowrap }
.good { color: #15803d } .bad { color: #b91c1c } .note { color: #52606d; font-size: .88em }
pre { overflow-x: auto; background: #f4f6f8; padding: 1em; font-size: .8em } summary { cursor: pointer; margin: 1em 0 }
"""


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Write a page about a policy or a run: scores, video, velocities, gait, loads, learning curves, a log."""

    policy: Annotated[Path, tyro.conf.Positional]
    """Policy file, or a run folder that holds one."""
    out: Path = Path("report.html")
    """HTML file to write."""
    log: Path | None = None
    """Recorded log to inspect on the page."""
    video: bool = True
    """Draw the video; it takes most of the time."""


def run_report(config: ReportConfig, console: "Console | None" = None) -> int:
    """Write the page as the command line asks; returns the exit status. Raises as `write_report` does."""
    from rich.console import Console

    write_report(config.policy, config.out, log=config.log, video=config.video)
    (console or Console()).print(f"report: {config.out}", soft_wrap=True)
    return 0
