from collections.abc import Callable

import numpy as np
import pytest

import robots
from robots.spec import RobotSpec
from sim.backend import BACKENDS, Backend, PlantConfig, Start, make_backend

MakeBackend = Callable[..., Backend]
MakeStart = Callable[..., Start]


@pytest.fixture(scope="session")
def spec() -> RobotSpec:
    return robots.load("unitree_h1_2")


@pytest.fixture(params=sorted(BACKENDS))
def make(request: pytest.FixtureRequest) -> MakeBackend:
    """Builds a backend; every test that uses it runs once for each backend there is."""

    def build(plant: PlantConfig | None = None, num: int = 2, threads: int = 1) -> Backend:
        return make_backend(request.param, plant or PlantConfig(), num, threads)

    return build


@pytest.fixture(scope="session")
def start_of(spec: RobotSpec) -> MakeStart:
    """Initial conditions of n robots in the default pose: on the ground, or wherever the arguments say."""

    def build(num: int = 2, **changes: object) -> Start:
        fields = {
            "base_pos": [0.0, 0.0, spec.spawn_height],
            "base_quat": [1.0, 0.0, 0.0, 0.0],
            "base_vel": np.zeros(6),
            "joint_pos": spec.array("default_pos"),
        } | changes
        return Start(**{k: np.broadcast_to(np.asarray(v, float), (num, np.shape(v)[-1])) for k, v in fields.items()})

    return build


@pytest.fixture(scope="session")
def default_targets(spec: RobotSpec) -> Callable[[int], np.ndarray]:
    """Joint targets (n, J) of the default pose."""
    return lambda num: np.tile(spec.array("default_pos"), (num, 1)).astype(np.float32)
