"""Tasks by name, imported when chosen."""

import importlib

from robots.errors import UnknownNameError
from sim.environment import Task

TASKS = {
    "velocity": "sim.tasks.velocity:flat",
    "velocity-rough": "sim.tasks.velocity:rough",
}
"""Task name to the function that makes it."""


def make_task(name: str, robot: str = "unitree_h1_2") -> Task:
    """A new task of this name for this robot. Raises UnknownNameError."""
    if name not in TASKS:
        raise UnknownNameError("task", name, TASKS)
    module, function = TASKS[name].split(":")
    task: Task = getattr(importlib.import_module(module), function)(robot)
    return task
