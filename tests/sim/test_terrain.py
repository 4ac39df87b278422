import itertools

import mujoco
import numpy as np
import pytest

import robots
from robots.model import GROUND, ModelConfig, build_model
from sim.terrain import RoughGround

GROUND_CONFIG = RoughGround(levels=4, band=4.0, margin=3.0, step=0.03, cell=0.25, seed=3)


@pytest.fixture(scope="module")
def compiled() -> tuple[mujoco.MjModel, mujoco.MjData]:
    spec = mujoco.MjSpec()
    GROUND_CONFIG.add(spec)
    model = spec.compile()
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return model, data


def everywhere(num: int, seed: int = 0) -> np.ndarray:
    """Points (num, 2) all over the height field."""
    return np.random.default_rng(seed).uniform([-2.99, -2.99], [18.99, 2.99], (num, 2))


def cast(model: mujoco.MjModel, data: mujoco.MjData, points: np.ndarray) -> np.ndarray:
    """Heights (n) of the ground that MuJoCo's rays find below points (n, 2)."""
    geom, down = np.zeros(1, np.int32), np.array([0.0, 0.0, -1.0])
    drops = [mujoco.mj_ray(model, data, np.array([*p, 2.0]), down, None, 1, -1, geom) for p in points]
    assert min(drops) >= 0
    return 2.0 - np.array(drops)


def test_height_at_is_where_rays_hit(compiled):
    points = everywhere(3000)
    np.testing.assert_allclose(GROUND_CONFIG.height_at(points), cast(*compiled, points), atol=1e-6)


def test_heights_at_grid_points_are_the_table():
    rows, columns = GROUND_CONFIG.heights.shape
    j, i = np.mgrid[0:rows, 0:columns]
    points = np.stack([i, j], axis=-1) * GROUND_CONFIG.cell - GROUND_CONFIG.margin
    np.testing.assert_allclose(GROUND_CONFIG.height_at(points), GROUND_CONFIG.heights, atol=1e-9)


def test_level_zero_and_the_way_up_to_it_are_flat(compiled):
    points = everywhere(3000)
    points = points[points[:, 0] < GROUND_CONFIG.band - GROUND_CONFIG.cell]
    assert len(points) > 500
    assert (GROUND_CONFIG.height_at(points) == 0).all()
    np.testing.assert_allclose(cast(*compiled, points), 0, atol=1e-6)


def test_roughness_grows_with_the_level_and_stays_in_its_range():
    ground = RoughGround()
    spans = []
    for level in range(ground.levels):
        inside = ground.centre(np.array([level])) + np.random.default_rng(level).uniform(-3.5, 3.5, (2000, 2))
        heights = ground.height_at(inside)
        assert np.abs(heights).max() <= level * ground.step + 1e-12
        spans.append(np.ptp(heights))
    assert spans[0] == 0
    assert all(b > a + ground.step for a, b in itertools.pairwise(spans))


def test_ground_goes_on_beyond_the_bands_as_far_as_a_robot_walks():
    ground = RoughGround()
    walk, spread = 1.4 * 20.0, 0.4 * ground.band  # fastest command, longest episode; starts off a band's centre
    assert ground.margin + ground.band / 2 - spread > walk
    assert ground.margin - spread > walk
    end = ground.levels * ground.band + ground.margin
    beyond = np.array([[-99.0, 0.0], [end + 99.0, 0.0], [20.0, 99.0]])
    edge = np.array([[-ground.margin, 0.0], [end, 0.0], [20.0, ground.margin]])
    np.testing.assert_array_equal(ground.height_at(beyond), ground.height_at(edge))


def test_no_ground_around_rises_above_highest_around():
    points = everywhere(200)
    for radius in (0.05, 0.3, 0.6):
        bound = GROUND_CONFIG.highest_around(points, radius)
        around = points[:, None] + np.random.default_rng(1).uniform(-radius, radius, (200, 300, 2))
        heights = GROUND_CONFIG.height_at(around)
        assert (heights <= bound[:, None] + 1e-12).all()
        assert (bound <= np.abs(GROUND_CONFIG.heights).max()).all()


def test_the_same_seed_gives_the_same_ground_and_another_seed_another():
    np.testing.assert_array_equal(RoughGround(seed=1).heights, RoughGround(seed=1).heights)
    assert (RoughGround(seed=1).heights != RoughGround(seed=2).heights).any()


def test_a_single_level_is_a_plane():
    assert (RoughGround(levels=1).heights == 0).all()


@pytest.mark.parametrize("level", [0, 3])
def test_a_robot_stands_on_it(level):
    spec = robots.load("unitree_h1_2")
    model = build_model(spec, ModelConfig(timestep=0.005, collision="feet", solver="fast"), GROUND_CONFIG.add)
    data = mujoco.MjData(model)
    centre = GROUND_CONFIG.centre(np.array([level]))
    data.qpos[:2], data.qpos[7:] = centre[0], spec.array("default_pos")
    data.qpos[2] = spec.spawn_height + GROUND_CONFIG.highest_around(centre, 0.3)[0]
    data.ctrl[:] = spec.array("default_pos")
    mujoco.mj_forward(model, data)
    touching = {model.geom(g).name for c in data.contact[: data.ncon] if c.dist < -1e-3 for g in c.geom}
    assert touching == set()
    mujoco.mj_step(model, data, 60)
    held = [c for c in data.contact[: data.ncon] if c.dist < 0]
    assert len(held) >= 3
    for c in held:
        assert GROUND in {model.geom(g).name for g in c.geom}
        assert c.pos[2] == pytest.approx(GROUND_CONFIG.height_at(c.pos[None, :2])[0], abs=0.006)
