"""`tarsus doctor`: what is installed, what can run here, and how to get what is missing.

Does not import torch. What needs libraries of the system is tried in a process of its own, because a broken graphics
driver ends the process that loads it.
"""

import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import robots
from robots.errors import UserError

State = Literal["ok", "missing", "differs", "broken"]

STYLES: dict[State, str] = {"ok": "green", "missing": "yellow", "differs": "yellow", "broken": "bold red"}
CORE_MODULES = ("numpy", "onnxruntime", "rosbags", "mcap", "zstandard", "yaml", "tyro", "rich", "robots", "logs")
RENDER_ONE = """
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
renderer = mujoco.Renderer(model, 16, 16)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer.update_scene(data)
assert renderer.render().any()
"""
OTHER_ENGINES = ("mujoco-warp", "isaacgym", "isaaclab")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Something that pip alone cannot bring to work, because it needs libraries of the system."""

    section: str
    """Section of the report."""
    module: str
    """Python module it belongs to; without it nothing is tried."""
    source: str
    """Python source that runs through if it works."""
    debian: str
    """Debian packages that it needs, all of them."""
    gl: str = ""
    """MUJOCO_GL while it runs."""


PROBES = {
    "egl": Probe(
        section="rendering",
        module="mujoco",
        source=RENDER_ONE,
        debian="libegl1 libegl-mesa0 libgl1-mesa-dri libopengl0",
        gl="egl",
    ),
    "osmesa": Probe(section="rendering", module="mujoco", source=RENDER_ONE, debian="libosmesa6", gl="osmesa"),
    "pinocchio": Probe(section="kinematics", module="pinocchio", source="import pinocchio", debian="libgomp1"),
}
"""Probes by name; of renderers one is enough, the best stands first."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One thing that was looked at."""

    section: str
    """machine, core, extra <name>, backend, rendering, kinematics or ros."""
    name: str
    """Package, engine or device."""
    state: State
    """ok; missing; differs: another version than the one tested; broken: there, but fails."""
    found: str
    """Version, or what is wrong."""
    advice: str = ""
    """What to do about it."""


def doctor(*, as_json: bool) -> int:
    """Print what can run here, as tables or one JSON object; returns 0, or 1 if the core itself cannot run."""
    items = list(examine())
    broken = [i for i in items if i.section == "core" and i.state in ("missing", "broken")]
    if as_json:
        print(json.dumps({"core_ok": not broken, "items": [asdict(i) for i in items]}, indent=2))
    else:
        _show(items)
        print("the core cannot run here" if broken else "the core can run here")
    return 1 if broken else 0


def examine() -> Iterator[Item]:
    """Everything that is looked at."""
    yield from _machine()
    yield from _core_modules()
    yield from _packages()
    yield from _backends()
    yield from _probes()
    yield from _ros()


def probe() -> dict[str, str]:
    """Try every probe whose Python module is there: name to "" if it works, else the last line it said."""
    runs = {
        name: subprocess.Popen(
            [sys.executable, "-c", p.source],
            env=os.environ | ({"MUJOCO_GL": p.gl, "PYOPENGL_PLATFORM": p.gl} if p.gl else {}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, p in PROBES.items()
        if util.find_spec(p.module)
    }
    said = {name: run.communicate()[1].strip() for name, run in runs.items()}
    return {
        name: "" if run.returncode == 0 else said[name].rpartition("\n")[2] or f"exit status {run.returncode}"
        for name, run in runs.items()
    }


def system_packages() -> list[str]:
    """Debian packages that would make work what does not: nothing for a renderer where another one works."""
    results = probe()
    missing = []
    for section in dict.fromkeys(p.section for p in PROBES.values()):
        tried = {n: results[n] for n in results if PROBES[n].section == section}
        if tried and all(tried.values()):
            missing.append(PROBES[next(iter(tried))].debian)
    return missing


def _machine() -> Iterator[Item]:
    yield Item(section="machine", name="python", state="ok", found=platform.python_version())
    yield Item(section="machine", name="system", state="ok", found=f"{platform.system()} {platform.machine()}")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Item(section="machine", name="cpu cores", state="ok", found=str(cpus))
    gpu = "NVIDIA driver" if shutil.which("nvidia-smi") else "none found; nothing here needs one"
    yield Item(section="machine", name="accelerator", state="ok", found=gpu)


def _core_modules() -> Iterator[Item]:
    """Every module of the core is imported, so that a damaged installation shows."""
    for module in CORE_MODULES:
        try:
            importlib.import_module(module)
        except ImportError as error:
            yield Item(section="core", name=module, state="broken", found=str(error), advice=_install(""))
    for name in robots.names():
        try:
            robots.load(name)
        except (UserError, OSError) as error:
            yield Item(section="core", name=name, state="broken", found=str(error), advice=_install(""))


def _packages() -> Iterator[Item]:
    """Required packages, installed versions against the tested ones."""
    try:
        requirements = metadata.requires("tarsus") or []
    except metadata.PackageNotFoundError:
        found = "not installed: runs from its source folder, so versions cannot be compared"
        yield Item(section="core", name="tarsus", state="differs", found=found, advice=_install(""))
        return
    yield Item(section="core", name="tarsus", state="ok", found=metadata.version("tarsus"))
    seen: set[str] = set()
    for requirement in map(Requirement, requirements):
        extra = _extra(requirement)
        if requirement.name in seen or extra == "all":
            continue
        seen.add(requirement.name)
        yield _package(requirement, extra)


def _extra(requirement: Requirement) -> str:
    """The extra that asks for a requirement, "" for the core."""
    marker = str(requirement.marker or "")
    return marker.partition("extra == ")[2].strip("\"'() ") if "extra" in marker else ""


def _package(requirement: Requirement, extra: str) -> Item:
    section = f"extra {extra}" if extra else "core"
    wanted = str(requirement.specifier) or "any"
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        advice = _install(extra)
        return Item(section=section, name=requirement.name, state="missing", found=f"wanted {wanted}", advice=advice)
    if requirement.specifier.contains(found, prereleases=True):
        return Item(section=section, name=requirement.name, state="ok", found=found)
    advice = f"tested with {wanted}: {_install(extra)}"
    return Item(section=section, name=requirement.name, state="differs", found=found, advice=advice)


def _install(extra: str) -> str:
    """How to get an extra, "" for the core; tarsus itself is on no package index."""
    if extra == "train":
        return "in the source folder: make setup (it takes a CPU build of torch)"
    return f"in the source folder: pip install '.[{extra}]'" if extra else "in the source folder: pip install ."


def _backends() -> Iterator[Item]:
    """Every backend takes one step of a robot."""
    try:
        from sim.backend import BACKENDS
    except ImportError as error:
        yield Item(section="backend", name="mujoco", state="missing", found=str(error), advice=_install("sim"))
        known = ["mujoco"]
    else:
        known = list(BACKENDS)
        yield from map(_backend, known)
    for name in OTHER_ENGINES:
        if name not in known:
            found = "this version cannot drive it"
            yield Item(section="backend", name=name, state="missing", found=found, advice="use mujoco")


def _backend(name: str) -> Item:
    from sim.backend import PlantConfig, make_backend

    try:
        backend = make_backend(name, PlantConfig(), 1, 1)
        backend.step(backend.spec.array("default_pos")[None].astype("float32"))
    except (ImportError, UserError) as error:
        return Item(section="backend", name=name, state="broken", found=str(error), advice=_install("sim"))
    return Item(section="backend", name=name, state="ok", found="steps a robot")


def _probes() -> Iterator[Item]:
    results = probe()
    for name, p in PROBES.items():
        others = [n for n in results if not results[n] and PROBES[n].section == p.section]
        if name not in results:
            extra = "sim" if p.module == "mujoco" else p.module
            yield Item(
                section=p.section, name=name, state="missing", found=f"not tried: no {p.module}", advice=_install(extra)
            )
        elif results[name]:
            needed = f" (not needed: {others[0]} works)" if others else ""
            advice = f"apt-get install {p.debian}{needed}"
            yield Item(section=p.section, name=name, state="broken", found=results[name], advice=advice)
        else:
            found = f"draws without a display (MUJOCO_GL={p.gl})" if p.gl else "works"
            yield Item(section=p.section, name=name, state="ok", found=found)


def _ros() -> Iterator[Item]:
    distributions = sorted(p.name for p in Path("/opt/ros").glob("*/")) if Path("/opt/ros").is_dir() else []
    source = f"source /opt/ros/{distributions[-1]}/setup.bash" if distributions else f"{_install('ros')} (x86-64)"
    if util.find_spec("rclpy"):
        found = f"importable, ROS_DISTRO={os.environ.get('ROS_DISTRO', 'not set')}"
        yield Item(section="ros", name="rclpy", state="ok", found=found)
    else:
        yield Item(section="ros", name="rclpy", state="missing", found="not importable", advice=source)
    if shutil.which("ros2"):
        yield Item(section="ros", name="ros2", state="ok", found=str(shutil.which("ros2")))
    else:
        advice = source if distributions else "install ROS 2 Jazzy or Kilted; it is on no Python index"
        yield Item(section="ros", name="ros2", state="missing", found="no such program", advice=advice)


def _show(items: list[Item]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "", "state", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    last = ""
    for item in items:
        state = Text(item.state, STYLES[item.state])
        section = Text(item.section if item.section != last else "")
        table.add_row(section, Text(item.name), state, Text(item.found), Text(item.advice))
        last = item.section
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table)
