"""Walk at a commanded velocity: forward, sideways, turning, on the spot or standing; flat or rough ground."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import robots
from sim.backend import Backend, Float32, Ids, PlantConfig, Start
from sim.environment import Bool, EpisodeConfig
from sim.gait import GaitConfig, advance_phase, foot_phases, standing, swing_progress
from sim.parameters import Randomize
from sim.sensors import SensorConfig
from sim.terrain import RoughGround

SOLE_BELOW_ANKLE = 0.045
START_CLEARANCE = 0.04
"""Drop at an episode's start [m]: starting joint angles are noisy, and no sole may begin inside the ground."""
FOOT_REACH = 0.4
"""No part of a foot is farther from the base than this, along x or y, at an episode's start [m]."""
CONTACT_FORCE = 5.0


@dataclass(frozen=True, kw_only=True)
class CommandConfig:
    """What velocities are asked for, in the base frame."""

    forward: tuple[float, float] = (-0.7, 1.4)
    """Range of the forward velocity [m/s]."""
    left: tuple[float, float] = (-0.7, 0.7)
    """Range of the velocity to the left [m/s]."""
    turn: tuple[float, float] = (-0.8, 0.8)
    """Range of the rate of turn to the left [rad/s]."""
    start_scale: float = 0.5
    """Share of these ranges at the start of training; grows to 1 with success."""
    stand_share: float = 0.1
    """Share of commands that ask to stand still."""
    turn_share: float = 0.15
    """Share of commands that ask to turn on the spot."""
    seconds: float = 5.0
    """Time between new commands [s]."""
    nudge_seconds: float = 1.0
    """Mean time between nudges at level 0 [s], five times that at level 1, 0 for none. A nudge sets the base's
    horizontal velocity to the command: from rest alone, policies learn to step on the spot long before they travel."""


@dataclass(frozen=True, kw_only=True)
class PushConfig:
    """Sudden changes of the base's horizontal velocity."""

    speed: float = 1.0
    """Velocity after a push, each axis uniform in +-speed [m/s]."""
    seconds: float = 6.0
    """Mean time between pushes at the end of the curriculum [s]; rarer before, 0 for none."""


@dataclass(frozen=True, kw_only=True)
class RewardWeights:
    """Weight of each term; the sum times the control step, not below zero, is the reward."""

    # what is asked
    track_linear: float = 2.0
    track_linear_sharp: float = 2.0
    track_turn: float = 1.5
    track_turn_sharp: float = 1.5
    alive: float = 0.15
    gait: float = 4.0
    imitate: float = 2.0
    # posture
    upright: float = -1.0
    height: float = -10.0
    vertical_speed: float = -1.0
    tumble: float = -0.1
    feet_flat: float = -0.5
    feet_apart: float = -2.0
    hips: float = -0.5
    # wear
    torque: float = -1e-5
    acceleration: float = -1e-7
    joint_speed: float = -5e-4
    target_rate: float = -0.15
    near_limit: float = -5.0
    # standing
    still: float = -0.5


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """One level in [0, 1] that rises with every good episode and falls with every bad one."""

    start_variety: float = 0.2
    """Share of the parameter randomization at level 0; all of it at level 1."""
    rate: float = 1 / 800
    """Rise per good episode; a bad one costs half of it. Independent of the number of simulations."""
    good_tracking: float = 0.8
    """Mean linear tracking score in [0, 1] that a good episode reaches, besides lasting to the time limit."""


@dataclass(frozen=True, kw_only=True)
class VelocityConfig:
    """All numbers of the task."""

    plant: PlantConfig
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    gait: GaitConfig = field(default_factory=GaitConfig)
    command: CommandConfig = CommandConfig()
    push: PushConfig = PushConfig()
    weights: RewardWeights = RewardWeights()
    curriculum: CurriculumConfig = CurriculumConfig()
    height: float = 0.99
    """Base height above the ground that is rewarded [m]."""
    max_tilt: float = 0.8
    """Angle between base and world vertical that ends an episode [rad]."""
    min_height: float = 0.6
    """Base height above the ground that ends an episode [m]."""
    start_noise: float = 0.1
    """Half width of the uniform noise on starting joint angles [rad]."""
    start_speed: float = 0.3
    """Half width of the uniform noise on the starting base velocity [m/s, rad/s]."""


TRAINING_PLANT = PlantConfig(
    lock=("arms", "wrists"),
    max_delay=0.02,
    randomize=(
        Randomize(pattern="contact.*_heel_*.friction", lo=0.4, hi=1.25, kind="value", shared=True),
        Randomize(pattern="contact.*_toe_*.friction", lo=0.4, hi=1.25, kind="value", shared=True),
        Randomize(pattern="joint.*.armature", lo=0.65, hi=1.35),
        Randomize(pattern="joint.*.friction", lo=0.3, hi=1.5),
        Randomize(pattern="link.*.mass", lo=0.88, hi=1.12),
        Randomize(pattern="link.pelvis.com", lo=-0.03, hi=0.03, kind="add"),
        Randomize(pattern="actuator.*.kp", lo=0.9, hi=1.1),
        Randomize(pattern="actuator.*.delay", lo=0.0, hi=0.02, kind="value", shared=True),
    ),
    sensors={
        "joint_pos": SensorConfig(noise=0.01, bias=0.01),
        "joint_vel": SensorConfig(noise=0.75),
        "imu_gyro": SensorConfig(noise=0.1, bias=0.02),
        "imu_quat": SensorConfig(noise=0.02, bias=0.02),
        "imu_accel": SensorConfig(noise=0.5),
    },
)


def flat(robot: str = "unitree_h1_2") -> "Velocity":
    """The task on flat ground."""
    return Velocity(VelocityConfig(plant=replace(TRAINING_PLANT, robot=robot)))


def rough(robot: str = "unitree_h1_2") -> "Velocity":
    """The task on ground of growing roughness."""
    return Velocity(VelocityConfig(plant=replace(TRAINING_PLANT, robot=robot, ground=RoughGround())))


@dataclass(kw_only=True)
class _Tally:
    """Sums of curve values since the last log."""

    values: dict[str, float] = field(default_factory=dict)
    count: int = 0


class Velocity:
    """The `Task` protocol."""

    def __init__(self, config: VelocityConfig) -> None:
        """A task with these numbers; `bind` gives it simulations."""
        self.config = config
        self.plant, self.episode = config.plant, config.episode
        self.spec = robots.load(config.plant.robot)
        self.level = 0.0
        self.fixed_command: Float32 | None = None
        """When set, (3,) or (N, 3), the only command ever given (evaluation)."""
        self.fixed_push: tuple[int, ...] = ()
        """Control steps of the episode at which everyone is pushed at full strength (evaluation)."""

    def bind(self, backend: Backend) -> None:
        """Prepare for the simulations of `backend`."""
        n, self._backend = backend.num_envs, backend
        self._dt = np.float32(self.plant.control_dt)
        self._s = backend.signals
        self._weights = {k: np.float32(w) for k, w in asdict(self.config.weights).items()}
        legs = self.spec.index(self.spec.group("legs"))
        self._legs = slice(int(legs[0]), int(legs[-1]) + 1)
        names = self.spec.group("legs")
        self._sideways = self.spec.index([n for n in names if n.endswith(("hip_yaw_joint", "hip_roll_joint"))])
        wanted = [f"{side}_{part}_joint" for side in ("left", "right") for part in ("hip_pitch", "knee")]
        self._sagittal = self.spec.index(wanted)
        self._default = self.spec.array("default_pos").astype(np.float32)
        limits = self.spec.array("pos_limit", names)
        middle, half = limits.mean(axis=1), 0.45 * np.ptp(limits, axis=1)
        self._soft_lo, self._soft_hi = (middle - half).astype(np.float32), (middle + half).astype(np.float32)
        self.phase = np.zeros(n, np.float32)
        self.stand = np.zeros(n, np.bool_)
        self.signals = {"command": np.zeros((n, 3), np.float32), "privileged.ground": np.zeros((n, 1), np.float32)}
        self._last_vel = np.zeros((n, len(legs)), np.float32)
        self._last_targets = np.tile(self._default[self._legs], (n, 1))
        self._resample = np.zeros(n, np.int64)
        self._terrain_level = np.zeros(n, np.int64)
        self._track_sum = np.zeros(n, np.float32)
        self._age = np.zeros(n, np.int64)
        self._feet_ground = np.zeros((n, len(self.spec.foot_bodies)), np.float32)
        self._tally = _Tally()

    def begin(self, ids: Ids, rng: np.random.Generator) -> Start:
        """Start episodes in `ids`: draw commands, return initial conditions."""
        n, c = len(ids), self.config
        self._draw_commands(ids, rng)
        self.phase[ids] = 0
        self._last_vel[ids], self._track_sum[ids], self._age[ids] = 0, 0, 0
        self._last_targets[ids] = self._default[self._legs]
        noise = rng.uniform(-c.start_noise, c.start_noise, (n, len(self._default)))
        yaw = rng.uniform(-np.pi, np.pi, n)
        pos = np.zeros((n, 3))
        if self.plant.ground is not None:
            spread = rng.uniform(-0.4, 0.4, (n, 2)) * (self.plant.ground.band, self.plant.ground.band)
            pos[:, :2] = self.plant.ground.centre(self._terrain_level[ids]) + spread
            pos[:, 2] = self.plant.ground.highest_around(pos[:, :2], FOOT_REACH)
            self.signals["privileged.ground"][ids, 0] = self.plant.ground.height_at(pos[:, :2].astype(np.float32))
        pos[:, 2] += self.spec.spawn_height + START_CLEARANCE
        quat = np.stack([np.cos(yaw / 2), 0 * yaw, 0 * yaw, np.sin(yaw / 2)], axis=1)
        speed = rng.uniform(-c.start_speed, c.start_speed, (n, 6))
        variety = c.curriculum.start_variety + (1 - c.curriculum.start_variety) * self.level
        return Start(base_pos=pos, base_quat=quat, base_vel=speed, joint_pos=self._default + noise, variety=variety)

    def advance(self, targets: Float32, steps: NDArray[np.int64], rng: np.random.Generator) -> tuple[Float32, Bool]:
        """Reward (N,) and failure (N,) of the control step just made, after `steps` (N) steps of the episode."""
        self.phase = advance_phase(self.phase, self.stand, float(self._dt), self.config.gait)
        self._measure_ground()
        terms = self._reward_terms(targets)
        total = sum(self._weights[k] * v for k, v in terms.items()) * self._dt
        reward = np.maximum(np.asarray(total, np.float32), 0)
        self._track_sum += terms["track_linear"]
        self._age += 1
        for k, v in terms.items():
            self._tally.values[k] = self._tally.values.get(k, 0.0) + float(v.mean())
        self._tally.count += 1
        return reward, self._failed()

    def disturb(self, steps: NDArray[np.int64], rng: np.random.Generator) -> None:
        """Change commands and push the robot, before the next control step."""
        self._resample -= 1
        due = np.flatnonzero(self._resample <= 0)
        if len(due):
            self._draw_commands(due, rng)
        self._nudge(rng)
        push = self.config.push
        if self.fixed_push:
            pushed = np.flatnonzero(np.isin(steps, self.fixed_push))
        elif push.seconds > 0:
            pushed = np.flatnonzero(rng.random(len(steps)) < self.level * self._dt / push.seconds)
        else:
            return
        if len(pushed):
            self._backend.push(pushed, rng.uniform(-push.speed, push.speed, (len(pushed), 2)))

    def finish(self, ids: Ids, steps: NDArray[np.int64], timed_out: Bool) -> None:
        """Learn from the episodes that end: the level of commands and pushes, and each robot's ground.

        The first, staggered episodes are shorter than their steps say and teach nothing.
        """
        whole = self._age[ids] == steps
        score = self._track_sum[ids] / np.maximum(steps, 1)
        good = whole & timed_out & (score > self.config.curriculum.good_tracking)
        rate = self.config.curriculum.rate
        self.level = float(np.clip(self.level + rate * (good.sum() - 0.5 * (whole & ~good).sum()), 0, 1))
        if self.plant.ground is not None:
            change = np.where(good, 1, np.where(timed_out | ~whole, 0, -1))
            self._terrain_level[ids] = np.clip(self._terrain_level[ids] + change, 0, self.plant.ground.levels - 1)

    def log(self) -> dict[str, float]:
        """Curves since the last call: mean of each unweighted reward term, and the curriculum."""
        count = max(self._tally.count, 1)
        out = {f"reward/{k}": v / count for k, v in self._tally.values.items()}
        out["curriculum/level"] = self.level
        if self.plant.ground is not None:
            out["curriculum/ground"] = float(self._terrain_level.mean())
        self._tally = _Tally()
        return out

    def state(self) -> dict[str, Any]:
        """Everything a bit-identical continuation needs."""
        arrays = {k: getattr(self, k).copy() for k in self._state_arrays}
        return {"arrays": arrays, "command": self.signals["command"].copy(), "level": self.level}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned."""
        for k, v in state["arrays"].items():
            getattr(self, k)[:] = v
        self.signals["command"][:] = state["command"]
        self.level = state["level"]
        self._measure_ground()

    _state_arrays = (
        "phase",
        "stand",
        "_last_vel",
        "_last_targets",
        "_resample",
        "_terrain_level",
        "_track_sum",
        "_age",
    )

    def _draw_commands(self, ids: Ids, rng: np.random.Generator) -> None:
        c, n = self.config.command, len(ids)
        command = self.signals["command"]
        if self.fixed_command is not None:
            command[ids] = np.broadcast_to(self.fixed_command, command.shape)[ids]
        else:
            scale = c.start_scale + (1 - c.start_scale) * self.level
            ranges = np.array([c.forward, c.left, c.turn]) * scale
            drawn = rng.uniform(ranges[:, 0], ranges[:, 1], (n, 3))
            kind = rng.random(n)
            turning = (kind >= c.stand_share) & (kind < c.stand_share + c.turn_share)
            drawn[turning] = _turns(drawn[turning, 2], ranges[2], self.config.gait.stand_below)
            drawn[kind < c.stand_share] = 0
            drawn[standing(drawn, self.config.gait)] = 0
            command[ids] = drawn
        self.stand[ids] = standing(command[ids], self.config.gait)
        self._resample[ids] = np.maximum(1, rng.uniform(0.5, 1.5, n) * c.seconds / self._dt)

    def _nudge(self, rng: np.random.Generator) -> None:
        seconds = self.config.command.nudge_seconds
        if self.fixed_command is not None or seconds <= 0:
            return
        nudged = np.flatnonzero(rng.random(len(self.stand)) < (1 - 0.8 * self.level) * self._dt / seconds)
        if not len(nudged):
            return
        w, x, y, z = self._s["privileged.base_quat"][nudged].T
        yaw = np.arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
        forward, left, _ = self.signals["command"][nudged].T
        velocity = np.stack([forward * np.cos(yaw) - left * np.sin(yaw), forward * np.sin(yaw) + left * np.cos(yaw)], 1)
        self._backend.push(nudged, velocity)

    def _measure_ground(self) -> None:
        ground = self.plant.ground
        if ground is None:
            return
        self.signals["privileged.ground"][:, 0] = ground.height_at(self._s["privileged.base_pos"][:, :2])
        feet = self._s["privileged.foot_pos"]
        self._feet_ground[:] = ground.height_at(feet[:, :, :2].reshape(-1, 2)).reshape(self._feet_ground.shape)

    def _height(self) -> Float32:
        return np.asarray(self._s["privileged.base_pos"][:, 2] - self.signals["privileged.ground"][:, 0])

    def _failed(self) -> Bool:
        quat = self._s["privileged.base_quat"]
        up = 1 - 2 * (quat[:, 1] ** 2 + quat[:, 2] ** 2)
        return np.asarray((up < np.cos(self.config.max_tilt)) | (self._height() < self.config.min_height))

    def _reward_terms(self, targets: Float32) -> dict[str, Float32]:
        s, legs = self._s, self._legs
        command, quat = self.signals["command"], s["privileged.base_quat"]
        lin, ang = s["privileged.base_lin_vel"], s["privileged.base_ang_vel"]
        pos, vel = s["privileged.joint_pos"][:, legs], s["privileged.joint_vel"][:, legs]
        effort, new = s["privileged.joint_effort"][:, legs], targets[:, legs]
        off = command[:, :2] - lin[:, :2]
        linear, turn = _square(off), (command[:, 2] - ang[:, 2]) ** 2
        gravity_xy = _square(2 * (quat[:, 1:2] * quat[:, 3:] - quat[:, :1] * quat[:, 2:3])) + _square(
            2 * (quat[:, 2:3] * quat[:, 3:] + quat[:, :1] * quat[:, 1:2])
        )
        outside = np.minimum(pos - self._soft_lo, 0) - np.maximum(pos - self._soft_hi, 0)
        terms = {
            "track_linear": np.exp(linear * np.float32(-4)),
            "track_linear_sharp": np.exp(linear * np.float32(-25)),
            "track_turn": np.exp(turn * np.float32(-4)),
            "track_turn_sharp": np.exp(turn * np.float32(-25)),
            "alive": np.ones_like(turn),
            "upright": gravity_xy,
            "height": (self._height() - np.float32(self.config.height)) ** 2,
            "vertical_speed": lin[:, 2] ** 2,
            "tumble": _square(ang[:, :2]),
            "hips": _square(s["privileged.joint_pos"][:, self._sideways]),
            "torque": _square(effort),
            "acceleration": _square((vel - self._last_vel) / self._dt),
            "joint_speed": _square(vel),
            "target_rate": _square(new - self._last_targets),
            "near_limit": -np.sum(outside, axis=1),
            "still": np.abs(pos - self._default[legs]).sum(axis=1) * self.stand,
            **self._feet_terms(),
        }
        self._last_vel[:], self._last_targets[:] = vel, new
        return terms

    def _feet_terms(self) -> dict[str, Float32]:
        s, gait = self._s, self.config.gait
        foot, velocity, up = s["privileged.foot_pos"], s["privileged.foot_vel"], s["privileged.foot_up"]
        force = np.sqrt(np.einsum("nfk,nfk->nf", s["privileged.foot_force"], s["privileged.foot_force"]))
        slip = np.einsum("nfk,nfk->nf", velocity[:, :, :2], velocity[:, :, :2])
        height = foot[:, :, 2] - self._feet_ground - np.float32(SOLE_BELOW_ANKLE)
        progress = swing_progress(foot_phases(self.phase), gait)
        wanted = np.float32(gait.clearance) * np.sin(np.float32(np.pi) * progress)
        stance = (progress == 0) | self.stand[:, None]
        stands = (force > CONTACT_FORCE) * np.exp(slip * np.float32(-20))
        aloft = np.maximum(1 - np.abs(height - wanted) / np.float32(gait.clearance), 0)
        swings = 0.5 * np.exp(force * np.float32(-0.01)) + 0.5 * aloft
        apart = np.sqrt(_square(foot[:, 0, :2] - foot[:, 1, :2]))
        lift = np.float32(gait.lift) * np.sin(np.float32(np.pi) * progress) * ~stance
        legs = s["privileged.joint_pos"][:, self._sagittal] - self._default[self._sagittal]
        off = legs.reshape(-1, 2, 2) + lift[:, :, None] * np.array([1, -2], np.float32)
        return {
            "imitate": np.exp(-4 * np.einsum("nfk,nfk->n", off, off)),
            "gait": np.where(stance, stands, swings).sum(axis=1) / 2,
            "feet_flat": np.einsum("nfk,nfk->n", up[:, :, :2], up[:, :, :2]),
            "feet_apart": np.maximum(np.float32(0.26) - apart, 0),
        }


def _turns(turn: NDArray[np.float64], limits: NDArray[np.float64], least: float) -> NDArray[np.float64]:
    """Commands (n, 3) to turn on the spot from rates (n), spread over `limits` without the rates that mean standing."""
    most = np.where(turn < 0, -limits[0], limits[1])
    rate = np.sign(turn) * (1.001 * least + (1 - 1.001 * least / most) * np.abs(turn))
    return np.stack([0 * rate, 0 * rate, rate], axis=1)


def _square(x: Float32) -> Float32:
    """Squared norm along the last axis, (N,)."""
    return np.asarray(np.einsum("ij,ij->i", x, x))
