"""Ground: flat, or random roughness of graded height."""

from dataclasses import dataclass
from functools import cached_property

import mujoco
import numpy as np
from numpy.typing import NDArray

from robots.model import GROUND

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RoughGround:
    """A height field with bands of growing roughness along x, from x = 0 on; level 0 is flat at z = 0."""

    levels: int = 6
    """Number of bands."""
    band: float = 8.0
    """Length of a band along x [m]."""
    margin: float = 32.0
    """Ground before the first band (flat), after the last (as rough) and to both sides of the middle line y = 0 [m].
    Where it is shorter than a robot walks in an episode, robots fall off the edge."""
    step: float = 0.01
    """Height range added per level, +- [m]."""
    cell: float = 0.2
    """Grid spacing [m]."""
    seed: int = 0
    """Seed of the heights."""

    @cached_property
    def heights(self) -> FloatArray:
        """Heights (ny, nx) [m] of the grid points, row 0 at y = -margin, column 0 at x = -margin; read-only."""
        x = -self.margin + self.cell * np.arange(round((self.levels * self.band + 2 * self.margin) / self.cell) + 1)
        level = np.clip((x + 1e-9) // self.band, 0, self.levels - 1)
        rows = round(2 * self.margin / self.cell) + 1
        table = np.random.default_rng(self.seed).uniform(-1.0, 1.0, (rows, len(x))) * self.step * level
        table.flags.writeable = False
        return np.asarray(table)

    def centre(self, level: NDArray[np.int64]) -> FloatArray:
        """Positions (n, 2) [m] in the middle of the bands `level` (n)."""
        return np.stack([(level + 0.5) * self.band, np.zeros(len(level))], axis=1)

    def add(self, model: mujoco.MjSpec) -> None:
        """Add the height field as the ground of a model."""
        low, span = self.heights.min(), max(np.ptp(self.heights), 1e-6)
        ny, nx = self.heights.shape
        length, width = (nx - 1) * self.cell, (ny - 1) * self.cell
        model.add_hfield(
            name=GROUND,
            nrow=ny,
            ncol=nx,
            size=(length / 2, width / 2, span, 0.5),
            userdata=((self.heights - low) / span).ravel(),
        )
        model.worldbody.add_geom(
            name=GROUND,
            type=mujoco.mjtGeom.mjGEOM_HFIELD,
            hfieldname=GROUND,
            pos=(length / 2 - self.margin, width / 2 - self.margin, low),
            contype=1,
            conaffinity=0,
            rgba=(0.55, 0.58, 0.62, 1),
        )

    def height_at(self, xy: NDArray[np.floating]) -> FloatArray:
        """Ground height (...) [m] below points (..., 2), on MuJoCo's triangles; beyond the edge as on it."""
        table = self.heights
        ny, nx = table.shape
        u = np.clip((xy[..., 0] + self.margin) / self.cell, 0, nx - 1)
        v = np.clip((xy[..., 1] + self.margin) / self.cell, 0, ny - 1)
        i, j = np.minimum(u.astype(np.intp), nx - 2), np.minimum(v.astype(np.intp), ny - 2)
        u, v = u - i, v - j
        # Each cell is cut along the diagonal from its lowest to its highest x and y.
        near, far = table[j, i], table[j + 1, i + 1]
        third = np.where(u > v, table[j, i + 1], table[j + 1, i])
        more, less = np.maximum(u, v), np.minimum(u, v)
        return np.asarray(near + (third - near) * more + (far - third) * less)

    def highest_around(self, xy: NDArray[np.floating], radius: float) -> FloatArray:
        """Height (n) [m] that no ground within `radius` [m] of the points (n, 2), in x and in y, rises above."""
        # Between grid points the ground lies below the highest of them, so that grid points just outside count too.
        window = np.arange(int(np.ceil(2 * radius / self.cell)) + 2)
        first = np.floor((xy - radius + self.margin) / self.cell).astype(np.intp)
        ny, nx = self.heights.shape
        i, j = np.clip(first[:, :1] + window, 0, nx - 1), np.clip(first[:, 1:] + window, 0, ny - 1)
        return np.asarray(self.heights[j[:, :, None], i[:, None, :]].max(axis=(1, 2)))
