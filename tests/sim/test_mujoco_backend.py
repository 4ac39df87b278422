import mujoco
import numpy as np
import pytest

from sim.backend import PlantConfig
from sim.mujoco_backend import MujocoBackend, model_config
from sim.parameters import Randomize
from sim.sensors import SensorConfig

LEGS_ONLY = ("waist", "arms", "wrists")


def begun(plant: PlantConfig, start_of, num: int = 3) -> tuple[MujocoBackend, np.random.Generator]:
    backend, rng = MujocoBackend(plant, num, 1), np.random.default_rng(0)
    backend.reset(np.arange(num), start_of(num), rng)
    backend.measure(rng)
    return backend, rng


def test_model_settings_follow_the_plant():
    fast = MujocoBackend(PlantConfig(lock=LEGS_ONLY, timestep=0.004), 1, 1).model
    assert (fast.opt.timestep, fast.nu, fast.opt.iterations) == (0.004, 12, 4)
    accurate = MujocoBackend(PlantConfig(solver="accurate", fuse=False, collision="full"), 1, 1).model
    assert (accurate.nu, accurate.opt.iterations) == (27, mujoco.MjModel.from_xml_string("<mujoco/>").opt.iterations)
    assert model_config(PlantConfig(max_delay=0.02)).max_delay == 0.02


def test_a_plant_without_delay_offers_none_and_one_with_delay_starts_without(start_of):
    assert not [n for n in MujocoBackend(PlantConfig(), 1, 1).parameters.names if n.endswith(".delay")]
    backend = MujocoBackend(PlantConfig(max_delay=0.02), 2, 1)
    assert (backend.model.actuator_delay == 0).all()
    assert "actuator.left_knee_joint.delay" in backend.parameters.names


@pytest.mark.parametrize("timestep", [0.005, 0.002])
def test_servos_remember_their_own_starting_angle(start_of, timestep):
    backend = MujocoBackend(PlantConfig(max_delay=0.02, timestep=timestep), 2, 1)
    joint_pos = np.linspace(-0.1, 0.1, 54).reshape(2, 27)
    backend.reset(np.arange(2), start_of(2, joint_pos=joint_pos), np.random.default_rng(0))
    for sim in range(2):
        model, data = backend.batch.get_model(sim), backend.batch.get_data(sim)
        for a in range(model.nu):
            for age in (timestep, 0.01, 0.02):
                remembered = mujoco.mj_readCtrl(model, data, a, data.time - age, np.zeros(1), -1)
                np.testing.assert_allclose(remembered, joint_pos[sim, a], atol=1e-12)


def test_readings_that_are_not_finite_break_their_simulation_even_without_a_warning(start_of, default_targets):
    sensors = {"imu_quat": SensorConfig(noise=0.02), "joint_pos": SensorConfig(noise=0.01)}
    backend, rng = begun(PlantConfig(lock=LEGS_ONLY, sensors=sensors), start_of)
    readings = np.array(backend._readings)
    readings[1, ::2] = np.nan
    readings[2] = np.inf
    backend._readings = readings
    assert backend.step(default_targets(3)).tolist() == [1, 2]
    backend.measure(rng)
    for name, values in backend.signals.items():
        assert np.isfinite(values).all(), name
    np.testing.assert_allclose(np.linalg.norm(backend.signals["imu_quat"][[0, 2]], axis=1), 1, atol=1e-5)
    assert backend.failures == 2


def test_fields_are_expanded_before_the_first_step_only(start_of, default_targets):
    rules = (
        Randomize(pattern="link.*.mass", lo=0.9, hi=1.1),
        Randomize(pattern="link.*.inertia", lo=0.9, hi=1.1),
        Randomize(pattern="actuator.*.delay", lo=0.0, hi=0.02, kind="value"),
    )
    backend = MujocoBackend(PlantConfig(lock=LEGS_ONLY, max_delay=0.02, randomize=rules), 3, 1)
    before = set(backend._expanded)
    rng = np.random.default_rng(0)
    backend.reset(np.arange(3), start_of(3), rng)
    backend.step(default_targets(3))
    assert backend._expanded == before == {"body_mass", "body_inertia", "body_iquat", "actuator_delay"}


def test_each_episode_draws_its_own_parameters(start_of):
    rules = (Randomize(pattern="link.*.mass", lo=0.8, hi=1.2, shared=True),)
    backend, rng = begun(PlantConfig(lock=LEGS_ONLY, randomize=rules), start_of, 4)
    first = backend.batch.expanded("body_subtreemass")[:, 0].copy()
    assert len(set(first)) == 4
    backend.reset(np.array([2]), start_of(1), rng)
    second = backend.batch.expanded("body_subtreemass")[:, 0]
    assert (second != first).tolist() == [False, False, True, False]


def test_a_state_can_be_stored_as_arrays_and_numbers(start_of):
    backend, _ = begun(PlantConfig(lock=LEGS_ONLY), start_of)

    def leaves(value):
        return [x for v in value.values() for x in leaves(v)] if isinstance(value, dict) else [value]

    assert all(isinstance(x, (np.ndarray, int, bool)) for x in leaves(backend.state()))
