"""Robots by name. Importing this needs numpy only."""

import importlib
from functools import cache
from pathlib import Path

from robots.errors import UnknownNameError, UserError
from robots.spec import JointSpec, RobotSpec

__all__ = ["JointSpec", "RobotSpec", "UnknownNameError", "UserError", "load", "names"]


def names() -> list[str]:
    """Names of all robots: the folders beside this file that hold a `spec.py`."""
    return sorted(p.parent.name for p in Path(__file__).parent.glob("*/spec.py"))


@cache
def load(name: str) -> RobotSpec:
    """The robot of this name. Raises UnknownNameError."""
    if name not in names():
        raise UnknownNameError("robot", name, names())
    spec: RobotSpec = importlib.import_module(f"robots.{name}.spec").SPEC
    return spec
