"""What sensors do to the truth: noise each sample, a bias and a delay each episode. Theirs, not the task's.

    sensor.<signal>.bias    constant offset, in the unit of the signal (imu_quat: rotation vector (3) [rad], IMU frame)
    sensor.<signal>.noise   half width of the uniform noise of each sample, in the same unit
    sensor.<signal>.delay   age of the reading [s], rounded to whole control steps

Names are globs, as in `sim.parameters`. A value that is set holds until an episode start draws it anew: for ever, where
neither the sensor's config nor a rule does.
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robots.errors import UnknownNameError, UserError
from sim.parameters import FloatArray, Ids, Randomize, fit_values

Float32 = NDArray[np.float32]

PREFIX = "sensor."
ATTRIBUTES = ("bias", "noise", "delay")


@dataclass(frozen=True, kw_only=True)
class SensorConfig:
    """Imperfections of one sensor, in the unit of its signal (imu_quat: rad about each axis of the IMU frame).

    Raises UserError for what no sensor can be.
    """

    noise: float = 0.0
    """Uniform noise, half width, drawn every control step."""
    bias: float = 0.0
    """Uniform constant offset, half width, drawn at each episode start."""
    delay: tuple[float, float] = (0.0, 0.0)
    """Range of the age of the reading [s], drawn at each episode start and rounded to whole control steps."""

    def __post_init__(self) -> None:
        """Refuse negative or non-finite values and a delay range in the wrong order."""
        lo, hi = self.delay
        if not all(np.isfinite(v) and v >= 0 for v in (self.noise, self.bias, lo, hi)) or lo > hi:
            raise UserError(f"a sensor needs noise, bias >= 0 and a delay 0 <= lo <= hi, all finite; got {self}")


class Sensors:
    """Turns true readings into measured ones, for all simulations at once.

    The readings stand side by side in one block (N, K); `layout` says which columns are whose. Orientation is
    disturbed by a small rotation, everything else by addition. Each call of `measure` for all simulations is one
    control step; a delay of d steps looks d of them back, in an episode no further than its start:

        control step     0    1    2    3    4
        truth            a    b    c    d    e
        delay 0          a    b    c    d    e
        delay 1          a    a    b    c    d
        delay 2          a    a    a    b    c
    """

    def __init__(
        self, layout: Mapping[str, slice], width: int, configs: Mapping[str, SensorConfig], num: int, control_dt: float
    ) -> None:
        """Prepare `num` simulations, `control_dt` [s] a step. Raises UnknownNameError for a config not in `layout`."""
        for name in configs:
            if name not in layout:
                raise UnknownNameError("sensor", name, layout)
        self._layout, self._num, self._dt = dict(layout), num, control_dt
        self._configs = {name: configs.get(name, SensorConfig()) for name in layout}
        self._columns = {name: np.arange(s.start, s.stop) for name, s in layout.items()}
        # Orientation's disturbance is a rotation vector: it takes three columns behind the readings.
        self._columns["imu_quat"] = np.arange(width, width + 3)
        self._width, self._quat = width, layout["imu_quat"]
        self._bias = np.zeros((num, width + 3), np.float32)
        self._spread = np.zeros((1, width + 3), np.float32)
        for name, config in self._configs.items():
            self._spread[:, self._columns[name]] = 2 * config.noise
        self._lag = np.zeros((num, len(layout)), np.intp)
        self._past = np.zeros((1, num, width), np.float32)
        self._now = 0
        self._disturbs = any(c.noise or c.bias for c in configs.values())
        self._reserve(max(self._steps(c.delay[1]) for c in self._configs.values()), self._past[0])

    @property
    def names(self) -> list[str]:
        """All parameter names, `sensor.<signal>.<attribute>`."""
        return [f"{PREFIX}{name}.{attribute}" for name in self._layout for attribute in ATTRIBUTES]

    def begin(
        self,
        ids: Ids,
        truth: Float32,
        rules: tuple[Randomize, ...],
        rng: np.random.Generator,
        variety: float = 1.0,
    ) -> None:
        """Start episodes in `ids` (n): draw biases, delays and `rules`; until now the sensors read `truth` (N, K).

        `variety` in [0, 1] draws what `rules` say in towards the configs' values, as in `Parameters.randomize`.
        """
        for k, (name, config) in enumerate(self._configs.items()):
            if config.bias:
                columns = self._columns[name]
                drawn = 2 * rng.random((len(ids), len(columns)), np.float32) - 1
                self._bias[ids[:, None], columns] = drawn * np.float32(config.bias)
            if config.delay[1]:
                self._lag[ids, k] = self._steps(rng.uniform(*config.delay, len(ids)))
        for rule in rules:
            matches = self._match(rule.pattern)
            nominals = [self._nominal(*match)[None] for match in matches]
            for match, values in zip(matches, rule.draw(nominals, len(ids), rng, variety), strict=True):
                self._write(*match, values[:, 0], truth, ids)
        if len(self._past) > 1:
            self._past[:, ids] = truth[ids]

    def assign(self, name: str, values: FloatArray | float, truth: Float32, ids: Ids | None = None) -> None:
        """Set what a glob matches, shaped as in `Parameters.assign`, while the true readings are `truth` (N, K).

        Raises UnknownNameError, UserError.
        """
        chosen = np.arange(self._num) if ids is None else ids
        matches = self._match(name)
        wanted = [fit_values(name, values, (len(chosen), 1, len(self._nominal(*m))))[:, 0] for m in matches]
        for match, value in zip(matches, wanted, strict=True):
            self._write(*match, value, truth, chosen)

    def measure(self, truth: Float32, out: Float32, rng: np.random.Generator, ids: Ids | None = None) -> None:
        """Write measured readings (n, K) for true ones (n, K) into `out`.

        For all simulations (no `ids`) a control step has passed; for `ids` the readings of this step are drawn again.
        """
        if len(self._past) > 1:
            truth = self._recall(truth, ids)
        if not self._disturbs:
            out[:] = truth
            return
        bias = self._bias if ids is None else self._bias[ids]
        spread = self._spread if ids is None or len(self._spread) == 1 else self._spread[ids]
        k = self._width
        rng.random(dtype=np.float32, out=out)
        out -= np.float32(0.5)
        out *= spread[:, :k]
        out += truth
        out += bias[:, :k]
        tilt = rng.random((len(out), 3), np.float32)
        tilt -= np.float32(0.5)
        tilt *= spread[:, k:]
        tilt += bias[:, k:]
        out[:, self._quat] = _tilted(truth[:, self._quat], tilt)

    def state(self) -> dict[str, Any]:
        """Everything a bit-identical continuation needs."""
        arrays = {k: getattr(self, f"_{k}").copy() for k in ("bias", "spread", "lag", "past")}
        return {**arrays, "now": self._now, "disturbs": self._disturbs}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned."""
        for k in ("bias", "spread", "lag", "past"):
            setattr(self, f"_{k}", state[k].copy())
        self._now, self._disturbs = state["now"], state["disturbs"]

    def _match(self, pattern: str) -> list[tuple[str, str]]:
        """Signal and attribute of every name the glob matches. Raises UnknownNameError."""
        found = [n for n in self.names if fnmatch.fnmatchcase(n, pattern)]
        if not found:
            raise UnknownNameError("parameter", pattern, self.names)
        return [(signal, attribute) for _, signal, attribute in (n.split(".") for n in found)]

    def _nominal(self, signal: str, attribute: str) -> FloatArray:
        """What the config says, (width,); the bias is nominally zero, the delay its range's lower end."""
        if attribute == "bias":
            return np.zeros(len(self._columns[signal]))
        config = self._configs[signal]
        return np.array([config.noise if attribute == "noise" else config.delay[0]])

    def _write(self, signal: str, attribute: str, values: FloatArray, truth: Float32, ids: Ids) -> None:
        """Write values (n, width) in the simulations `ids` (n)."""
        if not np.isfinite(values).all() or (attribute != "bias" and (values < 0).any()):
            wanted = "finite" if attribute == "bias" else "finite and not negative"
            raise UserError(f"{PREFIX}{signal}.{attribute} must be {wanted}, got {values.ravel()}")
        if attribute == "delay":
            lag = self._steps(values[:, 0])
            self._reserve(int(lag.max(initial=0)), truth)
            self._lag[ids, list(self._layout).index(signal)] = lag
            return
        self._disturbs = True
        at = (ids[:, None], self._columns[signal])
        if attribute == "bias":
            self._bias[at] = values
            return
        if len(self._spread) == 1:
            self._spread = np.repeat(self._spread, self._num, axis=0)
        self._spread[at] = 2 * values

    def _steps(self, seconds: Any) -> Any:
        """Control steps nearest to a time [s] or to times (n,)."""
        return np.rint(np.asarray(seconds) / self._dt).astype(np.intp)

    def _reserve(self, lag: int, truth: Float32) -> None:
        """Remember `lag` control steps besides the present one (N, K); what is not known is as the oldest known."""
        missing = lag + 1 - len(self._past)
        if missing > 0:
            known = truth[None] if len(self._past) == 1 else np.roll(self._past, -self._now - 1, axis=0)
            self._past = np.concatenate([np.repeat(known[:1], missing, axis=0), known])
            self._now = lag

    def _recall(self, truth: Float32, ids: Ids | None) -> Float32:
        """Readings (n, K) as old as each sensor's delay, remembering the true ones (n, K) when a step has passed."""
        rows = np.arange(self._num) if ids is None else ids
        if ids is None:
            self._now = (self._now + 1) % len(self._past)
        self._past[self._now, rows] = truth
        out = truth.copy()
        for k, columns in enumerate(self._layout.values()):
            lag = self._lag[rows, k]
            if lag.any():
                out[:, columns] = self._past[(self._now - lag) % len(self._past), rows, columns]
        return out


def _tilted(quat: Float32, rotation: Float32) -> Float32:
    """Quaternions (n, 4) w x y z after small rotations (n, 3) [rad] in their own frame, exact to second order."""
    w, v = quat[:, :1], quat[:, 1:]
    half = rotation * np.float32(0.5)
    out = np.concatenate([w - np.sum(v * half, axis=1, keepdims=True), v + w * half + np.cross(v, half)], axis=1)
    normalised: Float32 = out / np.sqrt(np.sum(out * out, axis=1, keepdims=True))
    return normalised
