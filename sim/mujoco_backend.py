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
from sim.backend import Float32, Ids, PlantConfig, Start
from sim.parameters import Parameters, Randomize
from sim.sensors import Sensors

BAD_WARNINGS = tuple(
    int(w)
    for w in (
        mujoco.mjtWarning.mjWARN_BADQPOS,
        mujoco.mjtWarning.mjWARN_BADQVEL,
        mujoco.mjtWarning.mjWARN_BADQACC,
        mujoco.mjtWarning.mjWARN_BADCTRL,
    )
)
MEASURED = ("joint_pos", "joint_vel", "joint_effort", "imu_gyro", "imu_accel", "imu_quat")


class MujocoBackend:
    """The `Backend` protocol on `mujoco.batch.Batch`."""

    def __init__(self, plant: PlantConfig, num_envs: int, threads: int = 0) -> None:
        """Build `num_envs` simulations of `plant` on `threads` threads (0: all cores)."""
        self.plant, self.num_envs = plant, num_envs
        self.spec = robots.load(plant.robot)
        config = ModelConfig(
            lock=self.spec.group(*plant.lock) if plant.lock else (),
            timestep=plant.timestep,
            collision="feet" if plant.collision == "feet" else "full",
            solver="fast" if plant.solver == "fast" else "accurate",
            fuse=plant.fuse,
            max_delay=plant.max_delay,
        )
        self.model = build_model(self.spec, config, plant.ground.add if plant.ground else None)
        joints = free_joints(self.spec, config)
        self.free = self.spec.index(joints)
        self._qpos_adr, self._qvel_adr = joint_addresses(self.model, joints)
        self.batch = Batch(self.model, num_envs, threads)
        self._qpos, self._qvel = self.batch.bind("qpos"), self.batch.bind("qvel")
        self._ctrl, self._history = self.batch.bind("ctrl"), self.batch.bind("history")
        self._readings = self.batch.bind("sensordata")
        self.parameters = Parameters(self.model, num_envs, self.batch.expand, lambda ids: self.batch.set_const(ids))
        if plant.max_delay:
            self.parameters.assign("actuator.*.delay", 0.0)
        self._expand_randomized(plant.randomize)
        self._history_start = self._initial_history(joints)
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
        warned = self.batch.warning[:, BAD_WARNINGS].any(axis=1)
        if not warned.any() and not len(raised):
            return raised
        broken = np.union1d(np.flatnonzero(warned), raised).astype(np.intp)
        self.failures += len(broken)
        self.batch.warning[broken] = 0
        return broken

    def reset(self, ids: Ids, start: Start, rng: np.random.Generator) -> None:
        """Start new episodes: draw parameters and sensor biases, set the state, refresh the signals of `ids`."""
        self.batch.reset(ids, stage=int(mujoco.mjtStage.mjSTAGE_NONE))
        self.batch.warning[ids] = 0
        self.parameters.randomize(self.plant.randomize, ids, rng)
        self._sensors.draw_bias(ids, rng)
        joint_pos = start.joint_pos[:, self.free]
        self._qpos[ids, :3], self._qpos[ids, 3:7] = start.base_pos, start.base_quat
        self._qpos[ids[:, None], self._qpos_adr] = joint_pos
        self._qvel[ids] = 0
        self._qvel[ids, :6] = start.base_vel
        self._ctrl[ids] = joint_pos
        self._history[ids] = self._history_start
        self.batch.forward(ids)
        self._read(ids)

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
        """Set the physical parameters a glob matches; see `sim.parameters`."""
        self.parameters.assign(name, values, ids)

    def state(self) -> dict[str, Any]:
        """Everything a bit-identical continuation needs, as arrays."""
        fields = {f: self.batch.expand(f).copy() for f in self._expanded_fields()}
        return {
            "rows": self.batch.state.copy(),
            "fields": fields,
            "parameters": self.parameters.state(),
            "true": self._true.copy(),
            "measured": self._measured.copy(),
            "bias": self._sensors.bias.copy(),
            "tilt_bias": self._sensors.tilt_bias.copy(),
            "failures": self.failures,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned."""
        for name, values in state["fields"].items():
            self.batch.expand(name)[:] = values
        self.parameters.restore(state["parameters"])
        if any(p in self._expanded_fields() for p in ("body_mass", "body_ipos", "body_inertia", "dof_armature")):
            self.batch.set_const()
        self.batch.state[:] = state["rows"]
        self._sensors.bias[:], self._sensors.tilt_bias[:] = state["bias"], state["tilt_bias"]
        self._true[:], self._measured[:] = state["true"], state["measured"]
        self.failures = state["failures"]
        self._publish(self._true, "privileged.")
        self._publish(self._measured, "")

    def save_failure(self, sim: int, folder: Path) -> Path:
        """Write the last state before simulation `sim` broke, for replay; returns the file.

        The archive holds the state row, the command, every model field that differs between simulations, and the plant.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"failure_{time.time_ns()}_{sim}.npz"
        fields = {f"field.{f}": self.batch.expand(f)[sim] for f in self._expanded_fields()}
        np.savez(path, state=self._before[sim], ctrl=self._ctrl[sim], plant=np.array(repr(self.plant)), **fields)
        return path

    def _expanded_fields(self) -> list[str]:
        return sorted(self._expanded)

    def _expand_randomized(self, rules: tuple[Randomize, ...]) -> None:
        """Expand, before the first step, every model field the rules write, so that memory and speed stay constant."""
        self._expanded: set[str] = set()
        original = self.batch.expand

        def expand(field: str) -> NDArray[np.float64]:
            self._expanded.add(field)
            return original(field)

        self.parameters.expand = expand
        nobody = np.empty(0, np.intp)
        self.parameters.randomize(rules, nobody, np.random.default_rng(0))

    def _initial_history(self, joints: tuple[str, ...]) -> NDArray[np.float64]:
        """Command history of an actuator that has been holding the default pose, (nhistory,)."""
        data = mujoco.MjData(self.model)
        for a, angle in enumerate(self.spec.array("default_pos", joints)):
            samples = int(self.model.actuator_history[a][0])
            if samples:
                times = -self.model.opt.timestep * np.arange(samples, 0, -1.0)
                mujoco.mj_initCtrlHistory(self.model, data, a, times, np.full(samples, angle))
        return np.array(data.history)

    def _make_signals(self, num_free: int) -> None:
        n, width = self.num_envs, self.model.nsensordata
        sizes = {name: num_free for name in MEASURED[:3]} | {"imu_gyro": 3, "imu_accel": 3, "imu_quat": 4}
        self._layout, end = {}, 0
        for name in MEASURED:
            self._layout[name] = slice(end, end + sizes[name])
            end += sizes[name]
        self._width = end
        self._true = np.zeros((n, width), np.float32)
        self._measured = np.zeros((n, end), np.float32)
        self._targets = np.zeros((n, num_free), np.float32)
        self._sensors = Sensors(self._layout, end, self.plant.sensors, n)
        default = self.spec.array("default_pos").astype(np.float32)
        self.signals = {}
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
        self.signals["privileged.base_pos"] = np.zeros((self.num_envs, 3), np.float32)
        self.signals["privileged.base_quat"] = np.zeros((self.num_envs, 4), np.float32)

    def _read(self, ids: Ids | None = None) -> None:
        """Copy the engine's readings (of `ids`, or all) into the true signals."""
        rows = slice(None) if ids is None else ids
        self._true[rows] = self._readings[rows]
        self.signals["privileged.foot_force"][rows] *= -1  # MuJoCo reports the force of the foot on the ground
        self.signals["privileged.base_pos"][:] = self._qpos[:, :3]
        self.signals["privileged.base_quat"][:] = self._qpos[:, 3:7]
        self._publish(self._true, "privileged.")

    def _publish(self, block: Float32, prefix: str) -> None:
        """Spread joint columns over all joints of the robot; locked joints keep their constant."""
        for name in MEASURED[:3]:
            self.signals[prefix + name][:, self.free] = block[:, self._layout[name]]
