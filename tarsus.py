"""The `tarsus` command: parses, calls a room, and says in one sentence what went wrong.

Rooms are imported by the command that needs them, so that the others run without torch and MuJoCo.
"""

import importlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

import robots
from robots.errors import UnknownNameError, UserError

Config = TypeVar("Config")
Command = Callable[[Sequence[str]], int]

PIPE_WIDTH = 200
"""Columns of a table that goes to a file or another program, so that nothing is cut."""
ROOMS = ("robots", "sim", "policies", "logs", "tarsus", "tarsus_doctor")


@dataclass(frozen=True, kw_only=True)
class RobotsConfig:
    """List the robots, or the joints of one: order, limits and gains."""

    robot: Annotated[str | None, tyro.conf.Positional] = None
    """Robot whose joints to list."""


@dataclass(frozen=True, kw_only=True)
class TasksConfig:
    """List the tasks that can be trained."""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Show what is installed, what can run here and how to get the rest. Exits with 1 if the core cannot run."""

    json: bool = False
    """Print one JSON object instead of a table."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write the policy file of a run anew from its last checkpoint, checked against torch."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Say what is in logs, how regular they are and what looks wrong. Exits with 1 if one cannot be read in full."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Logs: rosbag2 folders, .mcap, .db3, .csv or .json files."""
    robot: str | None = None
    """Robot whose joint limits to compare with; by default the one that the log names."""
    json: bool = False
    """Print one JSON list instead of tables."""
    plot: Path | None = None
    """PNG file for a picture of all channels over time."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Show a walking robot: run the shipped policy, train a little, record and inspect a log, write a report page."""

    out: Path = Path("demo")
    """Folder for what comes out."""
    minutes: float = 1.5
    """Length of the training [min]."""


def _robots(args: Sequence[str]) -> int:
    config = _parse(RobotsConfig, "robots", args)
    if config.robot is None:
        rows = [(s.name, str(len(s.joints)), s.model_hash[:12]) for s in map(robots.load, robots.names())]
        return _table(("robot", "joints", "model hash"), rows)
    joints = robots.load(config.robot).joints
    print("angles [rad], kp [N m/rad], kd [N m s/rad], effort [N m], speed [rad/s]")
    return _table(
        ("#", "joint", "group", "lower", "upper", "default", "kp", "kd", "effort", "speed"),
        [(str(i), j.name, j.group, *(f"{v:.4g}" for v in _numbers(j))) for i, j in enumerate(joints)],
    )


def _numbers(joint: robots.JointSpec) -> tuple[float, ...]:
    return (
        *joint.pos_limit,
        joint.default_pos,
        joint.stiffness,
        joint.damping,
        joint.effort_limit,
        joint.vel_limit,
    )


def _tasks(args: Sequence[str]) -> int:
    _parse(TasksConfig, "tasks", args)
    from sim.tasks import TASKS

    rows = []
    for name, maker in TASKS.items():
        module, function = maker.split(":")
        source = importlib.import_module(module)
        rows.append((name, _first_line(source), _first_line(getattr(source, function))))
    return _table(("task", "what the robot does", "variant"), rows)


def _first_line(documented: object) -> str:
    return (documented.__doc__ or "").strip().partition("\n")[0]


def _doctor(args: Sequence[str]) -> int:
    config = _parse(DoctorConfig, "doctor", args)
    from tarsus_doctor import doctor

    return doctor(as_json=config.json)


def _train(args: Sequence[str]) -> int:
    from policies.train import TrainConfig, train

    if args and not args[0].startswith("-"):
        args = ["--task", *args]  # `tarsus train velocity`
    train(_parse(TrainConfig, "train", args))
    return 0


def _export(args: Sequence[str]) -> int:
    config = _parse(ExportConfig, "export", args)
    from policies.export import export_run

    print(export_run(config.run))
    return 0


def _evaluate(args: Sequence[str]) -> int:
    from policies.evaluate import EvaluateConfig, run_evaluate

    return run_evaluate(_parse(EvaluateConfig, "evaluate", args))


def _play(args: Sequence[str]) -> int:
    from policies.play import PlayConfig, run_play

    return run_play(_parse(PlayConfig, "play", args))


def _report(args: Sequence[str]) -> int:
    from policies.report import ReportConfig, run_report

    return run_report(_parse(ReportConfig, "report", args))


def _inspect(args: Sequence[str]) -> int:
    config = _parse(InspectConfig, "log inspect", args)
    if not config.files:
        raise UserError("name at least one log: tarsus log inspect FILE...")
    from logs.inspect import run_inspect

    return run_inspect(config.files, config.robot, config.json, config.plot)


def _log(args: Sequence[str]) -> int:
    return _dispatch("tarsus log", LOG_COMMANDS, args)


def _demo(args: Sequence[str]) -> int:
    config = _parse(DemoConfig, "demo", args)
    from policies.demo import run_demo

    run_demo(config.out, minutes=config.minutes)
    return 0


LOG_COMMANDS: dict[str, tuple[Command, str]] = {
    "inspect": (_inspect, "say what is in logs and what looks wrong"),
}
COMMANDS: dict[str, tuple[Command, str]] = {
    "demo": (_demo, "see a robot walk: shipped policy, a short training, a log, a report page"),
    "train": (_train, "learn a task in simulation"),
    "evaluate": (_evaluate, "measure how well a policy walks"),
    "play": (_play, "watch a policy: video, pictures, a log, or live in the browser"),
    "report": (_report, "write a page about a policy or a run"),
    "export": (_export, "write the policy file of a run"),
    "log": (_log, "inspect robot logs"),
    "robots": (_robots, "list robots and their joints"),
    "tasks": (_tasks, "list tasks"),
    "doctor": (_doctor, "what is installed, what can run here, what is missing"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    0; 1: something was found wrong; 2: an error, said in one sentence; 130: Ctrl-C; 141: the reader of the output left.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names need not be UTF-8
    status = _guarded(list(sys.argv[1:] if argv is None else argv))
    try:
        print(end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail again at exit
        if isinstance(error, BrokenPipeError):
            return 141
        if status < 2:
            print(f"tarsus: cannot write the output: {error.strerror}", file=sys.stderr)
        return 2
    return status


def _guarded(args: list[str]) -> int:
    """Run one command; errors a person can act on become one sentence, unless --debug is given."""
    try:
        return _dispatch("tarsus", COMMANDS, [a for a in args if a != "--debug"])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
    except SystemExit as stop:  # the parser's, after its own message
        return stop.code if isinstance(stop.code, int) else 2
    except (UserError, OSError, ModuleNotFoundError) as error:
        sentence = _sentence(error)
        if "--debug" in args or sentence is None:
            raise
        print(f"tarsus: {sentence}", file=sys.stderr)
        return 2


def _dispatch(program: str, commands: Mapping[str, tuple[Command, str]], args: Sequence[str]) -> int:
    """Call the command that `args` name first. Raises UnknownNameError."""
    if not args or args[0] in ("-h", "--help"):
        print(_usage(program, commands))
        return 0 if args else 2
    if args[0] == "--version" and program == "tarsus":
        print(f"tarsus {metadata.version('tarsus')}")
        return 0
    if args[0] not in commands:
        kind = f"{program.removeprefix('tarsus')} command".strip()
        raise UnknownNameError(kind, args[0], commands)
    return commands[args[0]][0](args[1:])


def _usage(program: str, commands: Mapping[str, tuple[Command, str]]) -> str:
    width = max(map(len, commands))
    lines = [f"usage: {program} COMMAND ...", ""]
    lines += [f"  {name:<{width}}  {what}" for name, (_, what) in commands.items()]
    lines += [
        "",
        f"{program} COMMAND --help lists options with defaults and units; --debug shows where an error came from.",
    ]
    return "\n".join(lines)


def _parse(config: type[Config], name: str, args: Sequence[str]) -> Config:
    """The configuration that `args` give. Exits with 0 after --help and with 2 for bad arguments."""
    return tyro.cli(config, prog=f"tarsus {name}", args=args, config=(tyro.conf.FlagCreatePairsOff,))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(table)
    return 0


def _sentence(error: UserError | OSError | ModuleNotFoundError) -> str | None:
    """The error for a person, or None if it is a fault of ours that needs its traceback."""
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        return (
            None
            if package in ROOMS
            else f"this needs the Python package '{package}'; `tarsus doctor` says how to get it"
        )
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
