"""What an environment asks of a physics engine. Backends differ inside; signals, names and units do not."""

import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from robots.errors import UnknownNameError, UserError
from robots.spec import RobotSpec
from sim.parameters import Randomize
from sim.sensors import SensorConfig
from sim.terrain import RoughGround

Float32 = NDArray[np.float32]
Ids = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True)
class PlantConfig:
    """The simulated robot: what is modelled, how finely, and what varies."""

    robot: str = "unitree_h1_2"
    """Robot name."""
    lock: tuple[str, ...] = ()
    """Groups of joints that are rigid in the default pose."""
    timestep: float = 0.005
    """Physics step [s]."""
    decimation: int = 4
    """Physics steps per control step."""
    collision: str = "feet"
    """feet: soles on the ground only; full: all shapes, self-collision too."""
    solver: str = "fast"
    """fast: few solver iterations, for training; accurate: MuJoCo's own settings."""
    fuse: bool = True
    """Merge rigid links, for speed."""
    max_delay: float = 0.0
    """Longest command delay that may be drawn [s]."""
    ground: RoughGround | None = None
    """Rough ground, or None for a plane."""
    randomize: tuple[Randomize, ...] = ()
    """Physical parameters drawn at each episode start."""
    sensors: Mapping[str, SensorConfig] = field(default_factory=dict)
    """Imperfections by signal name."""

    @property
    def control_dt(self) -> float:
        """Control step [s]."""
        return self.timestep * self.decimation


def reference_plant(plant: PlantConfig) -> PlantConfig:
    """The plant every evaluation uses, whatever was trained on: all joints, 2 ms, all collisions, MuJoCo's own solver.

    It has no random parameters and perfect sensors. Raises UserError for a control step that 2 ms does not divide.
    """
    decimation = round(plant.control_dt / 0.002)
    if abs(decimation * 0.002 - plant.control_dt) > 1e-9:
        raise UserError(f"a control step of {plant.control_dt} s is no multiple of the reference step of 0.002 s")
    return replace(
        plant,
        lock=(),
        timestep=0.002,
        decimation=decimation,
        collision="full",
        solver="accurate",
        fuse=False,
        randomize=(),
        sensors={},
    )


def plant_to_json(plant: PlantConfig) -> str:
    """All numbers of a plant as JSON text, at full precision."""
    return json.dumps(asdict(plant))


def plant_from_json(text: str) -> PlantConfig:
    """The plant that `plant_to_json` wrote. Raises UserError for fields this version does not know."""
    fields = json.loads(text)
    try:
        fields["lock"] = tuple(fields["lock"])
        fields["ground"] = RoughGround(**fields["ground"]) if fields["ground"] else None
        fields["randomize"] = tuple(Randomize(**rule) for rule in fields["randomize"])
        fields["sensors"] = {
            name: SensorConfig(**{**config, "delay": tuple(config["delay"])})
            for name, config in fields["sensors"].items()
        }
        return PlantConfig(**fields)
    except (TypeError, KeyError) as error:
        raise UserError(f"this plant was written by another version of the software: {error}") from error


@dataclass(kw_only=True)
class Start:
    """Initial conditions of n episodes; quaternions are (w, x, y, z)."""

    base_pos: NDArray[np.float64]
    """World position of the base (n, 3) [m]."""
    base_quat: NDArray[np.float64]
    """World orientation of the base (n, 4)."""
    base_vel: NDArray[np.float64]
    """Linear world velocity and angular body velocity of the base (n, 6) [m/s, rad/s]."""
    joint_pos: NDArray[np.float64]
    """Joint angles in spec order (n, J) [rad]; locked joints are ignored."""
    variety: float = 1.0
    """Share of the way from the nominal to the drawn physical parameters, for curricula."""


class Backend(Protocol):
    """Many simulations of one plant, advanced together. `ids` choose some of them: sorted, each once.

    `signals` maps signal names to live float32 arrays (N, ...), measured (with noise) or, under `privileged.`, true:
    base_lin_vel and base_ang_vel (N, 3) in the base frame, base_pos (N, 3) and base_quat (N, 4) in the world,
    joint_pos, joint_vel, joint_effort (N, J), foot_pos, foot_vel, foot_up, foot_force (N, F, 3) in the world
    (force of the ground on the foot [N]). Joint signals cover all joints in spec order; a locked joint reads its
    default angle and zero. `free` are the positions of the joints that move.

    All of them are finite whatever happens. After `step`, readings are those at the start of the last physics step, as
    on a robot whose sensors are one sample old; base_pos and base_quat are those at its end.
    """

    spec: RobotSpec
    num_envs: int
    signals: dict[str, Float32]
    free: Ids

    def step(self, targets: Float32) -> Ids:
        """Hold joint targets (N, J) [rad] for one control step; returns simulations that broke and were stopped."""

    def reset(self, ids: Ids, start: Start, rng: np.random.Generator) -> None:
        """Start new episodes: draw parameters and sensor biases, set the state, refresh the signals of `ids`."""

    def measure(self, rng: np.random.Generator, ids: Ids | None = None) -> None:
        """Draw this control step's measured signals (of the simulations `ids`, or all)."""

    def push(self, ids: Ids, velocity: NDArray[np.float64]) -> None:
        """Set the horizontal base velocity in the world frame to `velocity` (n, 2) [m/s]."""

    def set_parameter(self, name: str, values: NDArray[np.float64] | float, ids: Ids | None = None) -> None:
        """Set the physical parameters a glob matches (`sim.parameters`), or those of the sensors (`sim.sensors`).

        Where a sensor has an element for each joint, values (..., J) are in spec order.
        """

    def state(self) -> dict[str, Any]:
        """Everything a bit-identical continuation needs."""

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned."""

    def save_failure(self, sim: int, folder: Path) -> Path:
        """Write the last state before simulation `sim` broke, for replay; returns the file."""


BACKENDS = {"mujoco": "sim.mujoco_backend:MujocoBackend"}
"""Backends by name, imported when chosen."""


def make_backend(name: str, plant: PlantConfig, num_envs: int, threads: int = 0) -> Backend:
    """The backend of this name (threads 0: all cores). Raises UnknownNameError."""
    if name not in BACKENDS:
        raise UnknownNameError("backend", name, BACKENDS)
    module, cls = BACKENDS[name].split(":")
    backend: Backend = getattr(importlib.import_module(module), cls)(plant, num_envs, threads)
    return backend
