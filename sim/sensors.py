"""What sensors do to the truth: noise each sample, a bias each episode. Both belong to the sensor, not to the task."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from robots.errors import UnknownNameError

Float32 = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class SensorConfig:
    """Imperfections of one sensor, in the unit of its signal (imu_quat: rad)."""

    noise: float = 0.0
    """Uniform noise, half width, drawn every control step."""
    bias: float = 0.0
    """Uniform constant offset, half width, drawn at each episode start."""


class Sensors:
    """Turns true readings into measured ones, for all simulations at once.

    The readings stand side by side in one block (N, K); `layout` says which columns are whose. Orientation is
    disturbed by a small rotation about a random axis, everything else by addition.
    """

    def __init__(self, layout: Mapping[str, slice], width: int, configs: Mapping[str, SensorConfig], num: int) -> None:
        """Prepare for `num` simulations. Raises UnknownNameError for a config of a signal that `layout` lacks."""
        for name in configs:
            if name not in layout:
                raise UnknownNameError("sensor", name, layout)
        self._noise = np.zeros(width, np.float32)
        self._bias_range = np.zeros(width, np.float32)
        for name, config in configs.items():
            if name != "imu_quat":
                self._noise[layout[name]] = config.noise
                self._bias_range[layout[name]] = config.bias
        self._tilt = configs.get("imu_quat", SensorConfig())
        self.bias = np.zeros((num, width), np.float32)
        self.tilt_bias = np.zeros((num, 3), np.float32)
        self._quat = layout["imu_quat"]
        self._active = bool(configs)

    def draw_bias(self, ids: NDArray[np.intp], rng: np.random.Generator) -> None:
        """New biases for the simulations `ids`."""
        shape = (len(ids), self.bias.shape[1])
        self.bias[ids] = (2 * rng.random(shape, np.float32) - 1) * self._bias_range
        self.tilt_bias[ids] = (2 * rng.random((len(ids), 3), np.float32) - 1) * np.float32(self._tilt.bias)

    def measure(self, truth: Float32, out: Float32, rng: np.random.Generator, ids: NDArray[np.intp] | None = None) -> None:
        """Write measured readings (n, K) for true ones (n, K) of the simulations `ids` (all by default) into `out`."""
        if not self._active:
            out[:] = truth
            return
        bias, tilt_bias = (self.bias, self.tilt_bias) if ids is None else (self.bias[ids], self.tilt_bias[ids])
        rng.random(dtype=np.float32, out=out)
        out -= np.float32(0.5)
        out *= 2 * self._noise
        out += truth
        out += bias
        tilt = rng.random((len(out), 3), np.float32)
        tilt -= np.float32(0.5)
        tilt *= np.float32(2 * self._tilt.noise)
        tilt += tilt_bias
        out[:, self._quat] = _tilted(truth[:, self._quat], tilt)


def _tilted(quat: Float32, rotation: Float32) -> Float32:
    """Quaternions (n, 4) w x y z after small rotations (n, 3) [rad] in their own frame, exact to second order."""
    w, v = quat[:, :1], quat[:, 1:]
    half = rotation * np.float32(0.5)
    out = np.concatenate([w - np.sum(v * half, axis=1, keepdims=True), v + w * half + np.cross(v, half)], axis=1)
    normalised: Float32 = out / np.sqrt(np.sum(out * out, axis=1, keepdims=True))
    return normalised
