"""Ground: flat, or random roughness of graded height."""

from collections.abc import Callable
from dataclasses import dataclass

import mujoco
import numpy as np

from robots.model import GROUND


@dataclass(frozen=True, kw_only=True)
class RoughGround:
    """A square height field with bands of growing roughness along x; level 0 is flat."""

    levels: int = 6
    """Number of bands."""
    band: float = 8.0
    """Length of a band along x [m]."""
    width: float = 24.0
    """Extent along y [m]."""
    step: float = 0.01
    """Height range added per level, +- [m]."""
    cell: float = 0.2
    """Grid spacing [m]."""
    seed: int = 0
    """Seed of the heights."""

    def heights(self) -> np.ndarray:
        """Heights (ny, nx) [m], row 0 at y = -width / 2, column 0 at x = 0."""
        rng = np.random.default_rng(self.seed)
        nx, ny = round(self.levels * self.band / self.cell) + 1, round(self.width / self.cell) + 1
        level = np.minimum(np.arange(nx) * self.cell // self.band, self.levels - 1)
        return np.asarray(rng.uniform(-1.0, 1.0, (ny, nx)) * self.step * level)

    def centre(self, level: np.ndarray) -> np.ndarray:
        """Positions (n, 2) [m] in the middle of the bands `level` (n)."""
        return np.stack([(level + 0.5) * self.band, np.zeros(len(level))], axis=1)

    def add(self, model: mujoco.MjSpec) -> None:
        """Add the height field as the ground of a model; flat ground lies at z = 0."""
        heights = self.heights()
        low, span = heights.min(), max(np.ptp(heights), 1e-6)
        ny, nx = heights.shape
        length = self.levels * self.band
        model.add_hfield(
            name=GROUND,
            nrow=ny,
            ncol=nx,
            size=(length / 2, self.width / 2, span, 0.5),
            userdata=((heights - low) / span).ravel(),
        )
        model.worldbody.add_geom(
            name=GROUND,
            type=mujoco.mjtGeom.mjGEOM_HFIELD,
            hfieldname=GROUND,
            pos=(length / 2, 0, low),
            contype=1,
            conaffinity=0,
            rgba=(0.55, 0.58, 0.62, 1),
        )

    def height_at(self, xy: np.ndarray) -> np.ndarray:
        """Ground height (n) [m] below points (n, 2), to the nearest grid point."""
        table = self.heights()
        ix = np.clip(np.rint(xy[:, 0] / self.cell).astype(int), 0, table.shape[1] - 1)
        iy = np.clip(np.rint((xy[:, 1] + self.width / 2) / self.cell).astype(int), 0, table.shape[0] - 1)
        return np.asarray(table[iy, ix])


Ground = Callable[[mujoco.MjSpec], None]
