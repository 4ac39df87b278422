"""Physics on the CPU: many simulations on a thread pool, bit-identical at any thread count (`mujoco.batch.Batch`)."""

import time
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from mujoco.batch import Batch, SimulationError
from numpy.typing import NDArray

import robots
from robots.model import ModelConfig, build_model, free_joints, joint_addresses
from sim.backend import Float32, Ids, PlantConfig, Start, plant_to_json
from sim.parameters import FloatArray, Parameters
from sim.sensors import PREFIX, Sensors

BAD_WARNINGS = (
    int(mujoco.mjtWarning.mjWARN_BADQPOS),
    int(mujoco.mjtWarning.mjWARN_BADQVEL),
    int(mujoco.mjtWarning.mjWARN_BADQACC),
    int(mujoco.mjtWarning.mjWARN_BADCTRL),
)
"""What MuJoCo counts when a state, an acceleration or a command is not finite or beyond 1e10."""
CONST_INPUTS = frozenset({"body_mass", "body_inertia", "body_ipos", "body_iquat", "dof_armature"})
"""Per-simulation model fields after which MuJoCo's derived constants must be computed again."""
MEASURED = ("joint_pos", "joint_vel", "joint_effort", "imu_gyro", "imu_accel", "imu_quat")


def model_config(plant: PlantConfig) -> ModelConfig:
    """How the robot's model of a plant is built."""
    return ModelConfig(
        lock=robots.load(plant.robot).group(*plant.lock) if plant.lock else (),
        timestep=plant.timestep,
        collision="feet" if plant.collision == "feet" else "full",
        solver="fast" if plant.solver == "fast" else "accurate",
        fuse=plant.fuse,
        max_delay=plant.max_delay,
    )


class MujocoBackend:
    """The `Backend` protocol on `mujoco.batch.Batch`."""

    def __init__(self, plant: PlantConfig, num_envs: int, threads: int = 0) -> None:
        """Build `num_envs` simulations of `plant` on `threads` threads (0: all cores)."""
        self.plant, self.num_envs = plant, num_envs
        self.spec = robots.load(plant.robot)
        config = model_config(plant)
        self.model = build_model(self.spec, config, plant.ground.add if plant.ground else None)
        joints = free_joints(self.spec, config)
        self.free = self.spec.index(joints)
        self._qpos_adr, _ = joint_addresses(self.model, joints)
        self.batch = Batch(self.model, num_envs, threads)
        self._qpos, self._qvel = self.batch.bind("qpos"), self.batch.bind("qvel")
        self._ctrl, self._history = self.batch.bind("ctrl"), self.batch.bind("history")
        self._readings = self.batch.bind("sensordata")
        self._rules = tuple(r for r in plant.randomize if not r.pattern.startswith(PREFIX))
        self._sensor_rules = tuple(r for r in plant.randomize if r.pattern.startswith(PREFIX))
        self._make_parameters()
        self._history_start, self._history_slots = self._initial_history()
        self._before = self.batch.state.copy()
        self._make_signals(len(joints))
        self.failures = 0

    def step(self, targets: Float32) -> Ids:
        """Hold joint targets (N, J) [rad] for one control step; returns simulations that broke and were stopped."""
        np.copyto(self._before, self.batch.state)
        np.take(targets, self.free, axis=1, out=self._targets, mode="clip")
        self._ctrl[:] = self._targets
        try:
            self.batch.step(nstep=self.plant.decimation)
            raised: Ids = np.empty(0, np.intp)
        except SimulationError as error:
            raised = np.asarray(error.ids, np.intp)
        self._read()
        broken = self._find_broken(raised)
        if len(broken):
            self.failures += len(broken)
            self.batch.warning[broken] = 0
            self._mend(broken)
        return broken

    def reset(self, ids: Ids, start: Start, rng: np.random.Generator) -> None:
        """Start new episodes: draw parameters and sensor biases, set the state, refresh the signals of `ids`."""
        self.batch.reset(ids, stage=int(mujoco.mjtStage.mjSTAGE_NONE))
        self.batch.warning[ids] = 0
        self.parameters.randomize(self._rules, ids, rng, start.variety)
        joint_pos = start.joint_pos[:, self.free]
        self._qpos[ids, :3], self._qpos[ids, 3:7] = start.base_pos, start.base_quat
        self._qpos[ids[:, None], self._qpos_adr] = joint_pos
        self._qvel[ids] = 0
        self._qvel[ids, :6] = start.base_vel
        self._ctrl[ids] = joint_pos
        self._history[ids] = self._history_start
        self._history[ids[:, None, None], self._history_slots] = joint_pos[:, :, None]
        self.batch.forward(ids)
        self._read(ids)
        self._sensors.begin(ids, self._true[:, : self._width], self._sensor_rules, rng, start.variety)

    def measure(self, rng: np.random.Generator, ids: Ids | None = None) -> None:
        """Draw this control step's measured signals (of the simulations `ids`, or all)."""
        truth = self._true[:, : self._width]
        if ids is None:
            self._sensors.measure(truth, self._measured, rng)
        else:
            rows = np.empty((len(ids), self._width), np.float32)
            self._sensors.measure(truth[ids], rows, rng, ids)
            self._measured[ids] = rows
        self._publish(self._measured, "")

    def push(self, ids: Ids, velocity: NDArray[np.float64]) -> None:
        """Set the horizontal base velocity in the world frame to `velocity` (n, 2) [m/s]."""
        self._qvel[ids, :2] = velocity

    def set_parameter(self, name: str, values: NDArray[np.float64] | float, ids: Ids | None = None) -> None:
        """Set the physical parameters a glob matches (`sim.parameters`), or those of the sensors (`sim.sensors`)."""
        if not name.startswith(PREFIX):
            self.parameters.assign(name, values, ids)
            return
        if name.endswith(".bias") and np.shape(values)[-1:] == (len(self.spec.joints),):
            values = np.asarray(values)[..., self.free]
        self._sensors.assign(name, values, self._true[:, : self._width], ids)

    def state(self) -> dict[str, Any]:
        """Everything a bit-identical continuation needs, as arrays."""
        return {
            "rows": self.batch.state.copy(),
            "fields": {f: self.batch.expand(f).copy() for f in sorted(self._expanded)},
            "parameters": self.parameters.state(),
            "sensors": self._sensors.state(),
            "true": self._true.copy(),
            "base": self._base.copy(),
            "measured": self._measured.copy(),
            "failures": self.failures,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned."""
        for name in self._expanded - set(state["fields"]):
            self.batch.expand(name)[:] = getattr(self.model, name)
        for name, values in state["fields"].items():
            self._expand(name)[:] = values
        self.parameters.restore(state["parameters"])
        if self._expanded & CONST_INPUTS:
            self.batch.set_const()
        self.batch.state[:] = state["rows"]
        self._sensors.restore(state["sensors"])
        self._true[:], self._base[:], self._measured[:] = state["true"], state["base"], state["measured"]
        self.failures = state["failures"]
        self._publish(self._true, "privileged.")
        self._publish(self._measured, "")

    def save_failure(self, sim: int, folder: Path) -> Path:
        """Write what `sim.replay` needs to repeat the last control step of simulation `sim`; returns the file.

        The archive holds the state before the step, the targets, every model field that differs between simulations,
        and, as text, the plant, the hash of the robot's model and MuJoCo's version. Raises OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"failure_{time.time_ns()}_{sim}.npz"
        np.savez(
            path,
            state=self._before[sim],
            targets=self._targets[sim],
            plant=np.array(plant_to_json(self.plant)),
            model_hash=np.array(self.spec.model_hash),
            mujoco=np.array(mujoco.__version__),
            **{f"field.{f}": self.batch.expand(f)[sim] for f in self._expanded},
        )
        return path

    def _make_parameters(self) -> None:
        """Expand, before the first step, every model field the rules write, so that memory and speed stay constant."""
        self._expanded: set[str] = set()
        self.parameters = Parameters(self.model, self.num_envs, self._expand, self.batch.set_const)
        self.parameters.randomize(self._rules, np.empty(0, np.intp), np.random.default_rng(0))

    def _expand(self, field: str) -> FloatArray:
        self._expanded.add(field)
        return np.asarray(self.batch.expand(field))

    def _initial_history(self) -> tuple[FloatArray, NDArray[np.intp]]:
        """Command memory (H) of servos at the start of an episode, and where (J, samples) the commands stand in it."""
        model, data = self.model, mujoco.MjData(self.model)
        samples = int(model.actuator_history[0, 0])
        blank, times = np.zeros(0), -model.opt.timestep * np.arange(samples, 0, -1.0)
        for command in (1.0, 0.0):
            for a in range(model.nu if samples else 0):
                mujoco.mj_initCtrlHistory(model, data, a, times, np.full(samples, command))
            blank, filled = np.array(data.history), blank
        slots = np.flatnonzero(filled != blank) if samples else np.empty(0, np.intp)
        return blank, slots.reshape(model.nu, samples)

    def _make_signals(self, num_free: int) -> None:
        n, width = self.num_envs, self.model.nsensordata
        sizes = dict.fromkeys(MEASURED[:3], num_free) | {"imu_gyro": 3, "imu_accel": 3, "imu_quat": 4}
        self._layout, end = {}, 0
        for name in MEASURED:
            self._layout[name] = slice(end, end + sizes[name])
            end += sizes[name]
        self._width = end
        self._true = np.zeros((n, width), np.float32)
        self._measured = np.zeros((n, end), np.float32)
        self._targets = np.zeros((n, num_free), np.float32)
        self._sensors = Sensors(self._layout, end, self.plant.sensors, n, self.plant.control_dt)
        default = self.spec.array("default_pos").astype(np.float32)
        self.signals: dict[str, Float32] = {}
        for prefix, block in (("privileged.", self._true), ("", self._measured)):
            self.signals[f"{prefix}joint_pos"] = np.tile(default, (n, 1))
            for name in MEASURED[1:3]:
                self.signals[prefix + name] = np.zeros((n, len(default)), np.float32)
            for name in MEASURED[3:]:
                self.signals[prefix + name] = block[:, self._layout[name]]
        self._make_privileged(end)

    def _make_privileged(self, end: int) -> None:
        """Views of the columns behind the measured ones, in the order `robots.model` adds the sensors."""
        feet = len(self.spec.foot_bodies)
        self.signals["privileged.base_lin_vel"] = self._true[:, end : end + 3]
        self.signals["privileged.base_ang_vel"] = self._true[:, end + 3 : end + 6]
        per_foot = self._true[:, end + 6 :].reshape(self.num_envs, feet, 4, 3)
        for k, name in enumerate(("foot_pos", "foot_vel", "foot_up", "foot_force")):
            self.signals[f"privileged.{name}"] = per_foot[:, :, k]
        self._base = np.zeros((self.num_envs, 7), np.float32)
        self.signals["privileged.base_pos"], self.signals["privileged.base_quat"] = self._base[:, :3], self._base[:, 3:]

    def _read(self, ids: Ids | None = None) -> None:
        """Copy the engine's readings (of `ids`, or all) into the true signals."""
        rows = slice(None) if ids is None else ids
        with np.errstate(over="ignore", invalid="ignore"):  # a simulation that broke; `step` looks for it
            self._true[rows] = self._readings[rows]
        self.signals["privileged.foot_force"][rows] *= -1  # MuJoCo reports the force of the foot on the ground
        self._base[rows] = self._qpos[rows, :7]
        self._publish(self._true, "privileged.")

    def _find_broken(self, raised: Ids) -> Ids:
        """Simulations that raised an error, were reset by MuJoCo, or read what is not finite."""
        warned = self.batch.warning[:, BAD_WARNINGS, 1].any(axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            finite = np.isfinite(self._true.sum())
        if not finite:
            warned |= ~np.isfinite(self._true).all(axis=1)
        if not len(raised) and not warned.any():
            return raised
        return np.union1d(np.flatnonzero(warned), raised).astype(np.intp)

    def _mend(self, broken: Ids) -> None:
        """Make the signals of broken simulations finite: zero for what is not, orientations to upright."""
        for block in (self._true, self._base):
            block[broken] = np.nan_to_num(block[broken], nan=0.0, posinf=0.0, neginf=0.0)
        for quat in (self._true[:, self._layout["imu_quat"]], self._base[:, 3:]):
            quat[broken, 0] += (quat[broken] == 0).all(axis=1)
        self._publish(self._true, "privileged.")

    def _publish(self, block: Float32, prefix: str) -> None:
        """Spread joint columns over all joints of the robot; locked joints keep their constant."""
        for name in MEASURED[:3]:
            self.signals[prefix + name][:, self.free] = block[:, self._layout[name]]
