import numpy as np
import pytest

from robots.errors import UnknownNameError, UserError
from sim.parameters import Randomize
from sim.sensors import SensorConfig, Sensors

LAYOUT = {"joint_pos": slice(0, 2), "imu_gyro": slice(2, 5), "imu_quat": slice(5, 9)}
WIDTH, DT = 9, 0.02
SENSOR_ATTRIBUTES = [f"sensor.{s}.{a}" for s in LAYOUT for a in ("bias", "noise", "delay")]


def make(num: int = 4, **configs: SensorConfig) -> Sensors:
    return Sensors(LAYOUT, WIDTH, configs, num, DT)


def readings(num: int = 4, seed: int = 0) -> np.ndarray:
    truth = np.random.default_rng(seed).normal(size=(num, WIDTH)).astype(np.float32)
    truth[:, 5:] /= np.linalg.norm(truth[:, 5:], axis=1, keepdims=True)
    return truth


def measure(sensors: Sensors, truth: np.ndarray, rng: np.random.Generator, ids: np.ndarray | None = None) -> np.ndarray:
    out = np.empty_like(truth)
    sensors.measure(truth, out, rng, ids)
    return out


def begin(sensors: Sensors, truth: np.ndarray, rng: np.random.Generator, *rules: Randomize) -> None:
    sensors.begin(np.arange(len(truth)), truth, rules, rng)


def angle_between(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Angle of the rotation from quaternion a to b, (n,) [rad]."""
    a, b = a.astype(float), b.astype(float)
    vector = a[:, :1] * b[:, 1:] - b[:, :1] * a[:, 1:] - np.cross(a[:, 1:], b[:, 1:])
    return 2 * np.arcsin(np.minimum(np.linalg.norm(vector, axis=1), 1))


def test_perfect_sensors_read_the_truth_and_draw_nothing():
    sensors, truth, rng = make(), readings(), np.random.default_rng(0)
    before = rng.bit_generator.state
    begin(sensors, truth, rng)
    np.testing.assert_array_equal(measure(sensors, truth, rng), truth)
    assert rng.bit_generator.state == before


def test_noise_is_uniform_of_the_configured_width_and_fresh_each_step():
    sensors = make(500, joint_pos=SensorConfig(noise=0.1), imu_gyro=SensorConfig(noise=0.02))
    truth, rng = readings(500), np.random.default_rng(0)
    begin(sensors, truth, rng)
    off = np.stack([measure(sensors, truth, rng) - truth for _ in range(20)])
    for columns, half in ((slice(0, 2), 0.1), (slice(2, 5), 0.02)):
        samples = off[..., columns]
        assert np.abs(samples).max() <= half + 1e-6
        assert samples.mean() == pytest.approx(0, abs=half / 50)
        assert samples.std() == pytest.approx(half / np.sqrt(3), rel=0.02)
        flat = samples.reshape(20, -1)
        assert np.abs(np.corrcoef(flat)[~np.eye(20, dtype=bool)]).max() < 0.2
    np.testing.assert_allclose(off[..., 5:], 0, atol=1e-6)


def test_a_bias_is_constant_over_an_episode_and_drawn_anew_at_the_next():
    sensors = make(300, joint_pos=SensorConfig(bias=0.05))
    truth, rng = readings(300), np.random.default_rng(0)
    begin(sensors, truth, rng)
    first = measure(sensors, truth, rng) - truth
    for seed in (1, 2):
        moved = readings(300, seed)
        np.testing.assert_allclose(measure(sensors, moved, rng) - moved, first, atol=1e-6)
    ended = np.array([3, 7])
    sensors.begin(ended, truth, (), rng)
    second = measure(sensors, truth, rng) - truth
    changed = np.flatnonzero((np.abs(second - first) > 1e-6).any(axis=1))
    np.testing.assert_array_equal(changed, ended)
    assert np.abs(first[:, :2]).max() <= 0.05 + 1e-6
    assert first[:, :2].std() == pytest.approx(0.05 / np.sqrt(3), rel=0.1)
    np.testing.assert_allclose(first[:, 2:], 0, atol=1e-6)


def test_the_truth_is_left_alone():
    sensors = make(4, **{name: SensorConfig(noise=0.3, bias=0.2, delay=(0.02, 0.06)) for name in LAYOUT})
    truth, rng = readings(), np.random.default_rng(0)
    kept = truth.copy()
    begin(sensors, truth, rng)
    measured = measure(sensors, truth, rng)
    np.testing.assert_array_equal(truth, kept)
    assert (measured != truth).all()


def test_orientation_stays_unit_and_tilts_by_the_noise():
    half = 0.05
    sensors = make(4000, imu_quat=SensorConfig(noise=half))
    truth, rng = readings(4000), np.random.default_rng(0)
    begin(sensors, truth, rng)
    measured = measure(sensors, truth, rng)
    np.testing.assert_allclose(np.linalg.norm(measured[:, 5:], axis=1), 1, atol=1e-6)
    angle = angle_between(truth[:, 5:], measured[:, 5:])
    assert angle.max() <= half * np.sqrt(3) * 1.001
    # Three uniform components of half width h: the mean square of the angle is h^2.
    assert np.sqrt(np.mean(angle**2)) == pytest.approx(half, rel=0.03)
    np.testing.assert_allclose(measured[:, :5], truth[:, :5], atol=1e-6)


def test_an_orientation_bias_is_a_rotation_in_the_sensor_frame():
    sensors, truth, rng = make(2), readings(2), np.random.default_rng(0)
    truth[:, 5:] = [[1, 0, 0, 0], [np.sqrt(0.5), 0, 0, np.sqrt(0.5)]]
    sensors.assign("sensor.imu_quat.bias", [0.0, 0.1, 0.0], truth)
    measured = measure(sensors, truth, rng)
    s, c = np.sin(0.05), np.cos(0.05)
    expected = [[c, 0, s, 0], [c * np.sqrt(0.5), -s * np.sqrt(0.5), s * np.sqrt(0.5), c * np.sqrt(0.5)]]
    np.testing.assert_allclose(measured[:, 5:], expected, atol=6e-5)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_delay_follows_the_timeline_of_the_docstring(lag):
    a, b, c, d, e = (np.full((1, WIDTH), value, np.float32) for value in (1, 2, 3, 4, 5))
    expected = {0: (a, b, c, d, e), 1: (a, a, b, c, d), 2: (a, a, a, b, c)}[lag]
    sensors = make(1, joint_pos=SensorConfig(delay=(lag * DT, lag * DT)))
    rng = np.random.default_rng(0)
    begin(sensors, a, rng)
    seen = [measure(sensors, a, rng, np.array([0]))] + [measure(sensors, truth, rng) for truth in (b, c, d, e)]
    np.testing.assert_array_equal([row[0, 0] for row in seen], [row[0, 0] for row in expected])
    np.testing.assert_array_equal([row[0, 2] for row in seen], [1, 2, 3, 4, 5])


def test_each_simulation_has_its_own_delay_and_its_own_episode():
    sensors, rng = make(3), np.random.default_rng(0)
    truth = np.zeros((3, WIDTH), np.float32)
    sensors.assign("sensor.joint_pos.delay", np.array([0.0, DT, 3 * DT]), truth)
    seen = []
    for step in range(1, 7):
        truth[:] = step
        seen.append(measure(sensors, truth, rng)[:, 0].tolist())
        if step == 4:
            sensors.begin(np.array([2]), truth, (), rng)
            assert measure(sensors, truth[[2]], rng, np.array([2]))[0, 0] == 4
    assert seen == [[1, 0, 0], [2, 1, 0], [3, 2, 0], [4, 3, 1], [5, 4, 4], [6, 5, 4]]


def test_each_sensor_has_its_own_delay():
    sensors = make(1, joint_pos=SensorConfig(delay=(DT, DT)), imu_gyro=SensorConfig(delay=(2 * DT, 2 * DT)))
    rng, truth = np.random.default_rng(0), np.zeros((1, WIDTH), np.float32)
    begin(sensors, truth, rng)
    for step in (1, 2, 3):
        truth[:] = step
        measured = measure(sensors, truth, rng)
    assert (measured[0, 0], measured[0, 2], measured[0, 5]) == (2, 1, 3)


def test_delays_are_drawn_from_their_range_in_whole_steps():
    sensors = make(3000, joint_pos=SensorConfig(delay=(0.0, 3 * DT)))
    rng, truth = np.random.default_rng(0), np.zeros((3000, WIDTH), np.float32)
    begin(sensors, truth, rng)
    for step in range(1, 8):
        truth[:] = step
        measured = measure(sensors, truth, rng)
    lags = 7 - measured[:, 0]
    shares = np.bincount(lags.astype(int), minlength=4) / 3000
    np.testing.assert_allclose(shares, [1 / 6, 1 / 3, 1 / 3, 1 / 6], atol=0.03)


def test_a_delay_set_in_flight_never_invents_a_reading():
    sensors, rng = make(1), np.random.default_rng(0)
    for step in (1, 2, 3):
        measure(sensors, np.full((1, WIDTH), step, np.float32), rng)
    sensors.assign("sensor.imu_gyro.delay", 2 * DT, np.full((1, WIDTH), 3, np.float32))
    seen = [measure(sensors, np.full((1, WIDTH), step, np.float32), rng)[0, 2] for step in (4, 5, 6, 7)]
    assert seen == [3, 3, 4, 5]
    sensors.assign("sensor.imu_gyro.delay", 4 * DT, np.full((1, WIDTH), 7, np.float32))
    seen = [measure(sensors, np.full((1, WIDTH), step, np.float32), rng)[0, 2] for step in (8, 9, 10)]
    assert seen == [5, 5, 6]


def test_setting_twice_equals_setting_once_and_holds_over_episodes():
    truth, rng = readings(), np.random.default_rng(0)
    for times in (1, 2):
        sensors = make()
        for _ in range(times):
            sensors.assign("sensor.joint_pos.bias", [0.3, -0.2], truth)
            sensors.assign("sensor.imu_gyro.bias", 0.1, truth, np.array([1]))
        begin(sensors, truth, rng)
        off = measure(sensors, truth, rng) - truth
        np.testing.assert_allclose(off[:, :2], np.tile([0.3, -0.2], (4, 1)), atol=1e-6)
        np.testing.assert_allclose(off[:, 2:5], np.array([0, 0.1, 0, 0])[:, None] * np.ones(3), atol=1e-6)


def test_noise_can_differ_between_simulations():
    sensors, truth, rng = make(3), readings(3), np.random.default_rng(0)
    sensors.assign("sensor.joint_*.noise", [0.0, 0.1, 0.4], truth)
    off = np.abs(np.stack([measure(sensors, truth, rng) - truth for _ in range(200)]))[..., :2].max(axis=(0, 2))
    np.testing.assert_allclose(off, [0, 0.1, 0.4], rtol=0.03, atol=1e-6)
    part = np.abs(np.stack([measure(sensors, truth[1:2], rng, np.array([1])) - truth[1:2] for _ in range(200)]))
    assert part[..., :2].max() == pytest.approx(0.1, rel=0.03)


def test_rules_draw_sensor_parameters_at_each_episode_start():
    rules = (
        Randomize(pattern="sensor.joint_pos.bias", lo=0.1, hi=0.2, kind="value"),
        Randomize(pattern="sensor.imu_gyro.noise", lo=0.5, hi=2.0),
        Randomize(pattern="sensor.*.delay", lo=0.0, hi=2 * DT, kind="value", shared=True),
    )
    sensors = make(200, imu_gyro=SensorConfig(noise=0.1))
    truth, rng = np.zeros((200, WIDTH), np.float32), np.random.default_rng(0)
    truth[:, 5] = 1
    drawn = []
    for _ in range(50):
        begin(sensors, truth, rng, *rules)
        drawn.append(measure(sensors, truth, rng))
    bias = np.stack(drawn)[..., :2]
    assert 0.1 - 1e-6 <= bias.min() < 0.102
    assert 0.198 < bias.max() <= 0.2 + 1e-6
    off = np.abs(np.stack([measure(sensors, truth, rng) for _ in range(300)]))[..., 2:5].max(axis=(0, 2))
    assert 0.045 < off.min() < 0.07
    assert 0.18 < off.max() <= 0.2 + 1e-6


def test_little_variety_draws_rules_in_towards_the_config():
    rules = (Randomize(pattern="sensor.imu_gyro.noise", lo=1.0, hi=1.0, kind="value"),)
    sensors = make(1, imu_gyro=SensorConfig(noise=0.5))
    truth, rng = np.zeros((1, WIDTH), np.float32), np.random.default_rng(0)
    truth[:, 5] = 1
    sensors.begin(np.array([0]), truth, rules, rng, variety=0.2)
    off = np.abs(np.stack([measure(sensors, truth, rng) for _ in range(500)]))[..., 2:5].max()
    assert off == pytest.approx(0.6, rel=0.01)


def test_state_and_restore_continue_bit_identically():
    rules = (Randomize(pattern="sensor.imu_gyro.noise", lo=0.5, hi=2.0),)
    config = SensorConfig(noise=0.1, bias=0.1, delay=(0.0, 0.1))

    def run(sensors: Sensors, rng: np.random.Generator, steps: range) -> list[np.ndarray]:
        out = []
        for step in steps:
            truth = readings(4, step)
            out.append(measure(sensors, truth, rng))
            if step % 5 == 0:
                sensors.begin(np.array([step % 4]), truth, rules, rng)
        return out

    one, rng = make(4, **dict.fromkeys(LAYOUT, config)), np.random.default_rng(0)
    begin(one, readings(), rng, *rules)
    run(one, rng, range(12))
    state, rng_state = one.state(), rng.bit_generator.state
    expected = run(one, rng, range(12, 30))
    other, other_rng = make(4, **dict.fromkeys(LAYOUT, config)), np.random.default_rng(1)
    other.restore(state)
    other_rng.bit_generator.state = rng_state
    np.testing.assert_array_equal(run(other, other_rng, range(12, 30)), expected)


def test_a_config_of_an_unknown_sensor_lists_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean imu_gyro"):
        make(1, imu_gyr=SensorConfig(noise=0.1))


def test_an_unknown_parameter_lists_the_nearest():
    with pytest.raises(UnknownNameError, match=r"did you mean sensor\.imu_gyro\.bias"):
        make().assign("sensor.imu_gyro.bia", 1.0, readings())


def test_names_are_those_of_the_vocabulary():
    assert make().names == SENSOR_ATTRIBUTES


@pytest.mark.parametrize(
    "config",
    [{"noise": -0.1}, {"bias": float("nan")}, {"delay": (0.1, 0.0)}, {"delay": (-0.1, 0.0)}, {"noise": float("inf")}],
)
def test_a_config_no_sensor_can_have_is_refused(config):
    with pytest.raises(UserError, match="0 <= lo <= hi"):
        SensorConfig(**config)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sensor.imu_gyro.noise", -0.1, "finite and not negative"),
        ("sensor.imu_gyro.delay", -0.1, "finite and not negative"),
        ("sensor.imu_gyro.bias", np.nan, "must be finite"),
        ("sensor.imu_gyro.bias", [1.0, 2.0], "takes one value, 3 values"),
    ],
)
def test_values_no_sensor_can_have_are_refused(name, value, message):
    with pytest.raises(UserError, match=message):
        make().assign(name, value, readings())
