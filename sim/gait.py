"""The stepping clock: which foot should stand when. The exported policy carries the same clock as recurrent state."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class GaitConfig:
    """A walk with two alternating feet."""

    period: float = 0.56
    """Duration of one cycle of two steps [s]."""
    stance: float = 0.55
    """Share of the cycle that a foot stands; above one half both feet stand in between."""
    stand_below: float = 0.1
    """Norm of the command (m/s, m/s, rad/s) below which the robot stands."""
    lift: float = 0.2
    """Reference of the swing leg at mid-swing: hip pitch -lift, knee +2 lift, ankle pitch -lift [rad]."""
    clearance: float = 0.06
    """Height of the swing foot's reference at mid-swing [m]."""


def standing(command: NDArray[np.floating], config: GaitConfig) -> NDArray[np.bool_]:
    """Whether a command (N, 3) asks to stand, (N,)."""
    norm = np.sqrt(np.einsum("ij,ij->i", command, command))
    return np.asarray(norm < config.stand_below)


def advance_phase(phase: Float32, stand: NDArray[np.bool_], dt: float, config: GaitConfig) -> Float32:
    """Phase (N,) in [0, 1) one control step later.

    Walking advances by dt / period. Standing finishes the step under way and halts at 0 or 1/2, where both feet stand:

        phase  0.48 -> 0.50 -> 0.50 -> 0.50   while the command is zero (period 0.8 s, dt 0.016 s)
    """
    halves = 2 * phase
    ahead = halves + np.float32(2 * dt / config.period)
    stop = np.where(halves == np.floor(halves), halves, np.floor(ahead))
    crossed = np.floor(ahead) != np.floor(halves)
    halted = stand & (crossed | (halves == np.floor(halves)))
    return np.asarray(np.where(halted, stop, ahead) / 2 % 1, np.float32)


def foot_phases(phase: Float32) -> Float32:
    """Phases of left and right foot, (N, 2)."""
    return np.stack([phase, (phase + np.float32(0.5)) % 1], axis=1)


def swing_progress(foot_phase: Float32, config: GaitConfig) -> Float32:
    """Progress of the swing in (0, 1], 0 while the foot stands; same shape."""
    return np.asarray(np.clip((foot_phase - config.stance) / (1 - config.stance), 0, 1), np.float32)
