"""What a policy makes of signals, and what its actions mean: torch modules that travel inside the policy file.

An interface turns raw signals and its own recurrent state into observations (`observe`), and an action back into joint
targets and the next state (`act`). Training and the exported graph run the same code, so that nothing is written twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robots.signals import Signal, robot_signals, select
from robots.spec import RobotSpec
from sim.gait import GaitConfig

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """One recurrent tensor."""

    shape: tuple[int, ...]
    """Shape without the batch axis."""
    initial: float = 0.0
    """Value of every element at an episode's start."""


def initial_state(specs: Mapping[str, StateSpec], num: int) -> dict[str, Tensor]:
    """Recurrent state of `num` robots at their episodes' start, name to (num, *shape)."""
    return {name: torch.full((num, *s.shape), s.initial) for name, s in specs.items()}


def restarted(state: Tensors, specs: Mapping[str, StateSpec], ids: Tensor) -> dict[str, Tensor]:
    """`state` with that of the robots `ids` (n,) set to an episode's start."""
    return {name: values.index_fill(0, ids, specs[name].initial) for name, values in state.items()}


@dataclass(frozen=True, kw_only=True)
class WalkingConfig:
    """How the walking interface scales, references and remembers."""

    action_scale: float = 0.25
    """Hip and knee angle per unit of action [rad]."""
    yaw_scale: float = 0.1
    """Hip yaw angle per unit of action [rad]; the pelvis alone is light, and coarse turns shake it."""
    ankle_scale: float = 0.35
    """Ankle angle per unit of action [rad]; ankles are softer, so that a unit means a similar torque."""
    stride_gain: float = 0.6
    """Share of the commanded step that the reference already makes: from below the hip to behind it in each stance."""
    leg_length: float = 0.85
    """Hip to ankle in the default pose [m]."""
    turn_gain: float = 0.8
    """Share of the commanded turn that the reference's hip yaw already makes in each stance."""
    history: int = 1
    """Frames of observation the policy sees, the present one included."""


class WalkingInterface(nn.Module):
    """Proprioceptive walking: pelvis attitude from the torso IMU, legs, command, gait clock; targets for the legs.

    A frame (F = 17 + 3 L values for L leg joints) holds: base angular velocity in the base frame x 0.25, gravity
    direction in the base frame, command x (2, 2, 1), leg angles minus default, leg speeds x 0.05, previous action,
    sine and cosine of the gait phase, and both times the scaled command. Joints other than the legs are held in the
    default pose.
    """

    inputs = ("joint_pos", "joint_vel", "imu_quat", "imu_gyro", "command")
    leg_index: Tensor
    waist_index: Tensor
    default: Tensor
    lower: Tensor
    upper: Tensor
    pattern: Tensor
    scale: Tensor
    spread: Tensor
    command_scale: Tensor

    def __init__(self, spec: RobotSpec, gait: GaitConfig, dt: float, config: WalkingConfig | None = None) -> None:
        """For a robot with groups "legs" (yaw, pitch, roll, knee, ankle pitch, ankle roll; left first) and an IMU.

        `dt` is the control step [s].
        """
        super().__init__()
        self.spec, self.gait, self.dt, self.config = spec, gait, dt, config or WalkingConfig()
        self.legs = spec.group("legs")
        self.num_actions = len(self.legs)
        self.frame = 17 + 3 * self.num_actions
        index = torch.as_tensor(spec.index(self.legs))
        self.register_buffer("leg_index", index)
        self.register_buffer("waist_index", torch.as_tensor(spec.index(spec.imu_joints)))
        self.register_buffer("default", torch.as_tensor(spec.array("default_pos"), dtype=torch.float32))
        limits = torch.as_tensor(spec.array("pos_limit"), dtype=torch.float32)
        self.register_buffer("lower", limits[:, 0])
        self.register_buffer("upper", limits[:, 1])
        self.register_buffer("pattern", _leg_pattern(spec, self.legs))
        scales = {"ankle": self.config.ankle_scale, "hip_yaw": self.config.yaw_scale}
        scale = [next((v for k, v in scales.items() if k in n), self.config.action_scale) for n in self.legs]
        self.register_buffer("scale", torch.tensor(scale))
        self.register_buffer("command_scale", torch.tensor([2.0, 2.0, 1.0]))
        spread = torch.zeros(self.num_actions, len(spec.joints))
        spread[torch.arange(self.num_actions), index] = 1
        self.register_buffer("spread", spread)

    @property
    def signals(self) -> tuple[Signal, ...]:
        """The input signals, in order."""
        return select(robot_signals(self.spec), self.inputs)

    @property
    def num_obs(self) -> int:
        """Width of `observe`."""
        return self.frame * self.config.history

    @property
    def states(self) -> dict[str, StateSpec]:
        """Recurrent state by name."""
        states = {"phase": StateSpec(shape=(1,)), "action": StateSpec(shape=(self.num_actions,))}
        if self.config.history > 1:
            states["history"] = StateSpec(shape=((self.config.history - 1) * self.frame,))
        return states

    def observe(self, signals: Tensors, state: Tensors) -> Tensor:
        """Observation (N, num_obs), oldest frame first."""
        quat, gyro = self._base_from_imu(signals)
        gravity = _gravity(quat)
        pos = signals["joint_pos"].index_select(1, self.leg_index) - self.default.index_select(0, self.leg_index)
        vel = signals["joint_vel"].index_select(1, self.leg_index)
        command, _ = self._command(signals)
        command = command * self.command_scale
        angle = 2 * torch.pi * state["phase"]
        sine, cosine = torch.sin(angle), torch.cos(angle)
        clock = [sine, cosine, sine * command, cosine * command]
        frame = torch.cat([0.25 * gyro, gravity, command, pos, 0.05 * vel, state["action"], *clock], dim=1)
        return torch.cat([state["history"], frame], dim=1) if self.config.history > 1 else frame

    def act(self, action: Tensor, obs: Tensor, signals: Tensors, state: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """Joint targets (N, J) [rad] for the action (N, num_actions), and the next state."""
        command, stand = self._command(signals)
        phase = self._advance(state["phase"], stand)
        legs = self._reference(phase, command) + self.scale * action
        targets = torch.clamp(self.default + legs @ self.spread, self.lower, self.upper)
        following = {"phase": phase, "action": action}
        if self.config.history > 1:
            following["history"] = obs[:, self.frame :]
        return targets, following

    def privileged(self, signals: Tensors) -> Tensor:
        """What only a simulation knows, for critics, (N, P).

        Velocity of the base in its own frame, its height and the feet's; force, speed and tilt of the feet, in the
        world frame.
        """
        foot_force = signals["privileged.foot_force"].flatten(1) * 0.002
        height = signals["privileged.base_pos"][:, 2:] - signals["privileged.ground"]
        feet = signals["privileged.foot_pos"][:, :, 2] - signals["privileged.ground"]
        foot_vel = signals["privileged.foot_vel"].flatten(1) * 0.5
        up = signals["privileged.foot_up"][:, :, :2].flatten(1) * 5.0
        lin = 2.0 * signals["privileged.base_lin_vel"]
        ang = 0.25 * signals["privileged.base_ang_vel"]
        return torch.cat([lin, ang, 4.0 * (height - 1.0), 5.0 * feet, foot_force, foot_vel, up], dim=1)

    def mirror_obs(self) -> tuple[Tensor, Tensor]:
        """Permutation and signs (num_obs) of an observation seen in a mirror."""
        permutation, signs = self.spec.mirror(self.legs)
        leg_p, leg_s = torch.as_tensor(permutation), torch.as_tensor(signs, dtype=torch.float32)
        head = torch.tensor([-1.0, 1, -1, 1, -1, 1, 1, -1, -1])
        n = self.num_actions
        frame_p = torch.cat([torch.arange(9), *(9 + k * n + leg_p for k in range(3)), 9 + 3 * n + torch.arange(8)])
        frame_s = torch.cat([head, leg_s, leg_s, leg_s, torch.tensor([-1.0, -1, -1, 1, 1, -1, 1, 1])])
        offsets = torch.arange(self.config.history) * self.frame
        return (frame_p + offsets[:, None]).flatten(), frame_s.repeat(self.config.history)

    def mirror_privileged(self) -> tuple[Tensor, Tensor]:
        """Permutation and signs (P) of the privileged vector seen in a mirror; feet change sides."""
        swap = torch.tensor([3, 4, 5, 0, 1, 2])
        flip = torch.tensor([1.0, -1, 1, 1, -1, 1])
        permutation = [torch.arange(7), 7 + torch.tensor([1, 0]), 9 + swap, 15 + swap, 21 + torch.tensor([2, 3, 0, 1])]
        signs = [torch.tensor([1.0, -1, 1, -1, 1, -1, 1, 1, 1]), flip, flip, torch.tensor([1.0, -1, 1, -1])]
        return torch.cat(permutation), torch.cat(signs)

    def mirror_action(self) -> tuple[Tensor, Tensor]:
        """Permutation and signs (num_actions) of an action seen in a mirror."""
        permutation, signs = self.spec.mirror(self.legs)
        return torch.as_tensor(permutation), torch.as_tensor(signs, dtype=torch.float32)

    def _base_from_imu(self, signals: Tensors) -> tuple[Tensor, Tensor]:
        """Base orientation (N, 4) and angular velocity (N, 3): R_base = R_imu Rz(q)^T, w_base = Rz(q) w_imu - q' z."""
        angle = signals["joint_pos"].index_select(1, self.waist_index).sum(1, keepdim=True)
        speed = signals["joint_vel"].index_select(1, self.waist_index).sum(1, keepdim=True)
        half = 0.5 * angle
        w, x, y, z = signals["imu_quat"].chunk(4, dim=1)
        c, s = torch.cos(half), torch.sin(half)
        quat = torch.cat([w * c + z * s, x * c - y * s, y * c + x * s, z * c - w * s], dim=1)
        gx, gy, gz = signals["imu_gyro"].chunk(3, dim=1)
        ca, sa = torch.cos(angle), torch.sin(angle)
        return quat, torch.cat([ca * gx - sa * gy, sa * gx + ca * gy, gz - speed], dim=1)

    def _command(self, signals: Tensors) -> tuple[Tensor, Tensor]:
        """The command (N, 3), zero where it asks to stand (training gave no other such command), and where (N, 1)."""
        command = signals["command"]
        stand = (command * command).sum(1, keepdim=True).sqrt() < self.gait.stand_below
        return torch.where(stand, 0, command), stand

    def _advance(self, phase: Tensor, stand: Tensor) -> Tensor:
        """`sim.gait.advance_phase` for (N, 1) tensors."""
        halves = 2 * phase
        ahead = halves + 2 * self.dt / self.gait.period
        resting = halves == torch.floor(halves)
        crossed = torch.floor(ahead) != torch.floor(halves)
        stop = torch.where(resting, halves, torch.floor(ahead))
        halves = torch.where(stand & (crossed | resting), stop, ahead)
        return torch.where(halves >= 2, halves - 2, halves) / 2

    def _reference(self, phase: Tensor, command: Tensor) -> Tensor:
        """Feed-forward leg angles (N, L): the swing leg lifts, feet travel and turn back in stance and ahead in swing.

        Feet land below the hip, not ahead of it: ahead of a body that is still slow they would brake it.
        """
        left_right = torch.cat([phase, torch.where(phase >= 0.5, phase - 0.5, phase + 0.5)], dim=1)
        stance = self.gait.stance
        swing = torch.clamp((left_right - stance) / (1 - stance), 0, 1)
        lift = self.gait.lift * torch.sin(torch.pi * swing)
        travel = torch.where(left_right < stance, 0.5 - left_right / stance, -0.5 * torch.cos(torch.pi * swing))
        step = stance * self.gait.period * command
        stride = (travel - 0.5) * (self.config.stride_gain / self.config.leg_length)
        forward, left = stride * step[:, 0:1], stride * step[:, 1:2]
        turn = travel * self.config.turn_gain * step[:, 2:3]
        return torch.stack([lift, forward, left, turn], dim=2).flatten(1) @ self.pattern


def _leg_pattern(spec: RobotSpec, legs: tuple[str, ...]) -> Tensor:
    """How lift, forward, left and turn of each foot move the leg joints, (2 * 4, L); feet stay level."""
    rows = {
        0: {"hip_pitch": -1.0, "knee": 2.0, "ankle_pitch": -1.0},
        1: {"hip_pitch": -1.0, "ankle_pitch": 1.0},
        2: {"hip_roll": 1.0, "ankle_roll": -1.0},
        3: {"hip_yaw": 1.0},
    }
    pattern = torch.zeros(2 * len(rows), len(legs))
    for foot, side in enumerate(("left", "right")):
        for row, joints in rows.items():
            for part, value in joints.items():
                pattern[len(rows) * foot + row, legs.index(f"{side}_{part}_joint")] = value
    return pattern


def _gravity(quat: Tensor) -> Tensor:
    """World down (0, 0, -1) in the frame of quaternions (N, 4) w x y z; (N, 3)."""
    w, x, y, z = quat.chunk(4, dim=1)
    return torch.cat([2 * (w * y - x * z), -2 * (y * z + w * x), 1 - 2 * (w * w + z * z)], dim=1)
