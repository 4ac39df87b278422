import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
MAY_IMPORT = {
    "robots": (),
    "logs": ("robots",),
    "sim": ("robots", "logs"),
    "policies": ("robots", "logs", "sim"),
    "sysid": ("robots", "logs", "sim"),
    "hardware": ("robots", "logs", "policies.contract"),
}
ROOMS = sorted(p.parent.name for p in REPO.glob("*/__init__.py"))
HEAVY = ("torch", "mujoco", "rsl_rl", "pinocchio", "matplotlib", "onnx")
CORE = (
    "robots",
    "robots.signals",
    "robots.unitree_h1_2.spec",
    "logs",
    "logs.inspect",
    "policies.contract",
    "tarsus_doctor",
)
HIDE = f"""
import importlib.machinery, sys
finder = importlib.machinery.PathFinder
find = finder.find_spec
def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in {HEAVY} else find(name, path, target)
finder.find_spec = find_others
"""
"""Source that makes heavy packages look as if they were not installed."""


def modules(room: str) -> list[Path]:
    return sorted((REPO / room).rglob("*.py"))


def own_imports(source: str) -> Iterator[str]:
    """Dotted names of our own modules that a module imports, at its top or later."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (n for n in names if n.partition(".")[0] in {*MAY_IMPORT, "tarsus", "tarsus_doctor"})


def within(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(f"{allowed}.")


def forbidden(room: str, source: str) -> list[str]:
    return [n for n in own_imports(source) if not any(within(n, a) for a in (room, *MAY_IMPORT[room]))]


def run(code: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(REPO)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


def test_every_package_is_a_room_of_the_table():
    assert ROOMS
    assert set(ROOMS) <= set(MAY_IMPORT)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_run_downwards_only(room):
    found = {p.relative_to(REPO).as_posix(): forbidden(room, p.read_text()) for p in modules(room)}
    assert found
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_within_a_room_are_absolute(room):
    relative = [
        f"{p.name}:{node.lineno}"
        for p in modules(room)
        for node in ast.walk(ast.parse(p.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("robots", "import sim"),
        ("robots", "from tarsus import main"),
        ("logs", "def f():\n    from sim.backend import BACKENDS"),
        ("sim", "import policies.contract as c"),
        ("hardware", "from policies import train"),
        ("hardware", "from policies.contracts import x"),
    ],
)
def test_an_upward_import_is_found(room, source):
    assert forbidden(room, source)


@pytest.mark.parametrize(
    "source", ["from policies.contract import Policy", "import robots", "from policies import contract"]
)
def test_what_the_robots_computer_needs_is_allowed(source):
    assert not forbidden("hardware", source)


@pytest.mark.parametrize("module", CORE)
def test_the_core_imports_without_learning_and_physics(module):
    result = run(HIDE + f"import {module}")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", ["torch", "mujoco"])
def test_what_is_hidden_here_is_not_found(module):
    assert f"No module named '{module}'" in run(HIDE + f"import {module}").stderr


@pytest.mark.parametrize("args", [["--help"], ["robots"], ["robots", "unitree_h1_2"], ["doctor"], ["log", "--help"]])
def test_these_commands_run_without_learning_and_physics(args):
    result = run(HIDE + f"import tarsus; sys.exit(tarsus.main({args}))")
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_ros_own_package_launch_is_not_shadowed():
    assert not (REPO / "launch" / "__init__.py").exists()
