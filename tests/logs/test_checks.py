import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from logs import checks

PERIOD_NS = 5_000_000


def regular(count: int = 1000) -> np.ndarray:
    return np.arange(count, dtype=np.int64) * PERIOD_NS + 1_700_000_000_000_000_000


def test_regular_stamps_have_no_faults() -> None:
    timing = checks.timing(regular())
    assert timing is not None
    assert (timing.period, timing.rate, timing.period_std) == pytest.approx((0.005, 200.0, 0.0), abs=1e-12)
    assert timing.duration == pytest.approx(999 * 0.005)
    assert (timing.gaps, timing.missing, timing.backwards, timing.duplicates) == (0, 0, 0, 0)


@settings(max_examples=50, deadline=None, database=None)
@given(removed=st.sets(st.integers(5, 94), max_size=20))
def test_removed_samples_are_found_as_gaps(removed: set[int]) -> None:
    stamps = np.delete(regular(100), sorted(removed))
    runs = [i for i in removed if i - 1 not in removed]
    # One missing sample doubles the step, which is below the threshold of 2.5 periods.
    found = [i for i in runs if i + 1 in removed]
    timing = checks.timing(stamps)
    assert timing is not None
    assert timing.gaps == len(found)
    assert timing.gap_starts == pytest.approx(sorted((i - 1) * 0.005 for i in found))
    assert timing.missing == sum(next(n for n in range(i, 100) if n not in removed) - i for i in found)


@settings(max_examples=50, deadline=None, database=None)
@given(data=st.data())
def test_swapped_and_repeated_stamps_are_counted(data: st.DataObject) -> None:
    places = data.draw(st.sets(st.integers(0, 40).map(lambda i: 2 * i + 5), max_size=10))
    kinds = {i: data.draw(st.booleans()) for i in places}
    stamps = regular(100)
    for i, swap in kinds.items():
        if swap:
            stamps[[i, i + 1]] = stamps[[i + 1, i]]
        else:
            stamps[i + 1] = stamps[i]
    timing = checks.timing(stamps)
    assert timing is not None
    assert timing.backwards == sum(kinds.values())
    assert timing.duplicates == len(kinds) - sum(kinds.values())


def test_jitter_is_measured() -> None:
    steps = np.tile([4_000_000, 6_000_000], 500)
    timing = checks.timing(np.cumsum(steps))
    assert timing is not None
    assert timing.period_std == pytest.approx(0.001, rel=1e-3)
    assert (timing.period_p1, timing.period_p99) == pytest.approx((0.004, 0.006))


def test_a_clock_that_stands_still_or_one_stamp_is_no_clock() -> None:
    still = checks.timing(np.zeros(5, dtype=np.int64))
    assert still is not None
    assert (still.rate, still.duplicates, still.gaps) == (0.0, 4, 0)
    assert checks.timing(np.zeros(1, dtype=np.int64)) is None
    assert checks.timing(np.zeros(0, dtype=np.int64)) is None


def test_two_clocks_are_compared() -> None:
    header = regular()
    offset = checks.offset(header, header + 2_000_000 + (header - header[0]) // 1000)
    assert offset is not None
    assert offset.lowest == pytest.approx(0.002)
    assert offset.highest == pytest.approx(0.002 + 999 * 5e-6)
    assert offset.drift == pytest.approx(1e-3, rel=1e-3)
    assert checks.offset(header[:1], header[:1]) is None


@settings(max_examples=100, deadline=None, database=None)
@given(values=arrays(np.int64, st.integers(0, 50), elements=st.integers(0, 2)))
def test_runs_put_together_give_the_values_again(values: np.ndarray) -> None:
    starts, lengths = checks.run_lengths(values)
    np.testing.assert_array_equal(np.repeat(values[starts], lengths), values)
    assert (np.diff(values[starts]) != 0).all()


def test_longest_run() -> None:
    assert checks.longest_run(np.array([0, 1, 1, 0, 1, 1, 1, 0], dtype=bool)) == 3
    assert checks.longest_run(np.zeros(4, dtype=bool)) == 0
    assert checks.longest_run(np.zeros(0, dtype=bool)) == 0


def test_a_clipped_sine_saturates_at_both_ends() -> None:
    wave = 2.0 * np.sin(np.linspace(0, 2 * np.pi, 1000, endpoint=False))
    found = {s.kind: s for s in checks.saturation(np.clip(wave, -1.0, 1.5))}
    assert {k: s.value for k, s in found.items()} == {"maximum": 1.5, "minimum": -1.0}
    assert found["maximum"].longest == found["maximum"].samples == int((wave >= 1.5).sum())
    assert found["minimum"].samples == int((wave <= -1.0).sum())


def test_smooth_quantised_held_and_binary_signals_do_not_saturate() -> None:
    wave = np.sin(np.linspace(0, 40, 4000))
    assert checks.saturation(wave) == []
    assert checks.saturation(np.round(np.random.default_rng(0).normal(size=4000), 1)) == []
    assert checks.saturation(np.repeat(wave[::20], 20)) == []
    assert checks.saturation((wave > 0).astype(float)) == []
    assert checks.saturation(np.full(100, np.nan)) == []


def test_samples_at_a_limit_are_counted_from_both_sides() -> None:
    values = np.concatenate([np.zeros(10), np.full(7, 99.8), np.zeros(5), np.full(3, -120.0), [np.nan]])
    found = checks.at_limit(values, -100.0, 100.0)
    assert found is not None
    assert (found.kind, found.value, found.samples, found.longest) == ("limit", 100.0, 10, 7)
    assert checks.at_limit(values, -200.0, 200.0) is None


@pytest.mark.parametrize("rows", [2, 4, 10])
def test_held_values_give_their_hold(rows: int) -> None:
    values = np.repeat(np.random.default_rng(0).normal(size=(50, 3)), rows, axis=0)
    held = checks.held(values)
    assert held is not None
    assert (held.rows, held.share, held.intervals) == (rows, 1.0, 48)


def test_one_late_change_does_not_hide_a_hold() -> None:
    values = np.repeat(np.arange(50.0)[:, None], 4, axis=0)
    held = checks.held(np.delete(values, 100, axis=0))
    assert held is not None
    assert (held.rows, held.matching) == (4, held.intervals - 1)


def test_free_and_constant_signals_are_not_held() -> None:
    rng = np.random.default_rng(0)
    assert checks.held(rng.normal(size=(200, 2))) is None
    assert checks.held(np.ones((200, 2))) is None
    assert checks.held(np.cumsum(rng.random((400, 1)) < 0.3, axis=0)) is None


def test_missing_values_count_as_unchanged() -> None:
    values = np.array([[np.nan], [np.nan], [1.0], [1.0], [np.nan]])
    assert checks.changes(values).tolist() == [False, True, False, True]


def motion(count: int = 4000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    time = np.arange(count) * 0.005
    frequency = np.array([2.0, 3.0, 5.0])
    return time, np.sin(time[:, None] * frequency), frequency * np.cos(time[:, None] * frequency)


@settings(max_examples=30, deadline=None, database=None)
@given(scale=st.floats(0.5, 2.0))
def test_a_wrong_clock_is_found_to_a_tenth_of_a_per_cent(scale: float) -> None:
    time, position, velocity = motion()
    ratio = checks.clock_ratio(time / scale, position, velocity, ("a", "b", "c"))
    assert ratio is not None
    assert ratio.ratio == pytest.approx(scale, rel=1e-3)
    assert ratio.implied == pytest.approx(0.005, rel=1e-3)
    assert ratio.elements == ("a", "b", "c")
    assert ratio.faulty == (abs(ratio.ratio - 1) > checks.CLOCK_TOLERANCE)


def test_noise_widens_the_interval_around_the_truth() -> None:
    rng = np.random.default_rng(0)
    time, position, velocity = motion()
    noisy = velocity + rng.normal(size=velocity.shape) * 0.8
    ratio = checks.clock_ratio(time, position + rng.normal(size=position.shape) * 1e-3, noisy, ("a", "b", "c"))
    assert ratio is not None
    assert ratio.low < 1.0 < ratio.high
    assert not ratio.faulty


def test_coarse_velocities_prove_no_clock_fault() -> None:
    time, position, velocity = motion()
    truncated = np.trunc(velocity[:, :1] * 0.05 / 0.02) * 0.02
    ratio = checks.clock_ratio(time, position[:, :1] * 0.05, truncated, ("a",))
    assert ratio is not None
    assert abs(ratio.ratio - 1.0) > checks.CLOCK_TOLERANCE
    assert not ratio.faulty


def test_gaps_wraps_and_missing_samples_do_not_disturb_the_comparison() -> None:
    time, position, velocity = motion()
    wrapped = (position * 4 + np.pi) % (2 * np.pi) - np.pi
    fast = velocity * 4
    fast[500:510] = np.nan
    kept = np.r_[0:1000, 1400:4000]
    ratio = checks.clock_ratio(time[kept], wrapped[kept], fast[kept], ("a", "b", "c"))
    assert ratio is not None
    assert ratio.ratio == pytest.approx(1.0, rel=1e-3)


def test_joints_that_do_not_fit_are_left_out_and_rest_proves_nothing() -> None:
    time, position, velocity = motion()
    position[:, 1] = np.random.default_rng(0).normal(size=len(time))
    ratio = checks.clock_ratio(time, position, velocity, ("a", "b", "c"))
    assert ratio is not None
    assert ratio.elements == ("a", "c")
    assert checks.clock_ratio(time, 0 * position, 0 * velocity, ("a", "b", "c")) is None
    assert checks.clock_ratio(time[:50], position[:50], velocity[:50], ("a", "b", "c")) is None
    assert checks.clock_ratio(time[:3], position[:3], velocity[:3], ("a", "b", "c")) is None


def test_degrees_stand_out_and_single_spikes_do_not() -> None:
    angle = np.sin(np.linspace(0, 50, 1000))
    spiky = angle.copy()
    spiky[500] = 1000.0
    values = np.stack([angle, np.degrees(angle), spiky, np.full(1000, np.nan)], axis=1)
    assert checks.beyond_turn(values).tolist() == [False, True, False, False]


def test_whole_numbers() -> None:
    wave = np.linspace(-2, 2, 100)
    values = np.stack([np.round(wave), wave, (wave > 0).astype(float), np.full(100, np.nan)], axis=1)
    assert checks.whole_numbers(values).tolist() == [True, False, False, False]


@settings(max_examples=50, deadline=None, database=None)
@given(amplitude=st.integers(2, 8000), bits=st.sampled_from([16, 32]))
def test_wrapped_integers_are_found_and_undone(amplitude: int, bits: int) -> None:
    signed = np.round(amplitude * np.sin(np.linspace(0, 20, 500)))
    stored = np.where(signed < 0, signed + 2.0**bits, signed)
    assert checks.wrapped_bits(stored) == bits
    np.testing.assert_array_equal(checks.unwrapped(stored, bits), signed)


def test_true_unsigned_and_signed_values_are_not_called_wrapped() -> None:
    ramp = np.linspace(0, 65535, 2000).round()
    assert checks.wrapped_bits(ramp) == 0
    assert checks.wrapped_bits(ramp - 30000) == 0
    assert checks.wrapped_bits(np.array([0.0, 65535.5])) == 0
    assert checks.wrapped_bits(np.array([], dtype=float)) == 0


def walking(count: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Orientations (w, x, y, z) of a robot that turns while leaning a little, and the gravity it feels."""
    yaw, lean = np.linspace(0, 3, count), np.full(count, 0.2)
    quat = np.stack(
        [
            np.cos(yaw / 2) * np.cos(lean / 2),
            np.cos(yaw / 2) * np.sin(lean / 2),
            np.sin(yaw / 2) * np.sin(lean / 2),
            np.sin(yaw / 2) * np.cos(lean / 2),
        ],
        axis=1,
    )
    return quat, 9.81 * np.stack([np.zeros(count), np.sin(lean), np.cos(lean)], axis=1)


def test_a_right_quaternion_agrees_with_gravity() -> None:
    quat, accel = walking()
    check = checks.quaternion_check(quat, accel)
    assert check is not None
    assert check.tilt_error == pytest.approx(0.0, abs=1e-5)
    assert check.norm_error < 1e-12
    assert not check.misplaced


def test_a_quaternion_in_the_wrong_order_is_found() -> None:
    quat, accel = walking()
    as_labelled = np.roll(quat, 1, axis=1)
    check = checks.quaternion_check(as_labelled, accel)
    assert check is not None
    assert check.tilt_error_shifted == pytest.approx(0.0, abs=1e-5)
    assert check.misplaced


def test_without_acceleration_only_an_upside_down_robot_is_suspect() -> None:
    quat, _ = walking()
    right, wrong = checks.quaternion_check(quat, None), checks.quaternion_check(np.roll(quat[:50], 1, axis=1), None)
    assert right is not None
    assert wrong is not None
    assert (right.tilt_error, right.misplaced, wrong.misplaced) == (None, False, True)


def test_quaternions_that_are_not_unit_or_not_there() -> None:
    quat, accel = walking()
    check = checks.quaternion_check(1.1 * quat, accel)
    assert check is not None
    assert check.norm_error == pytest.approx(0.1)
    assert checks.quaternion_check(np.full((5, 4), np.nan), None) is None
    assert checks.quaternion_check(np.zeros((5, 4)), None) is None


@pytest.mark.parametrize(
    ("name", "role", "command"),
    [
        ("position", "position", False),
        ("jpos", "position", False),
        ("jpos_des", "position", True),
        ("goal_position", "position", True),
        ("vel_meas", "velocity", False),
        ("speed", "velocity", False),
        ("motor_state.dq", "velocity", False),
        ("tau_con", "effort", True),
        ("arm_joint_effort", "effort", False),
        ("torque_enable", "", False),
        ("temp", "", False),
        ("twist.linear", "", False),
    ],
)
def test_names_tell_what_a_field_is(name: str, role: str, command: bool) -> None:
    assert (checks.role(name), checks.is_command(name)) == (role, command)


def test_names_that_belong_together_have_one_key() -> None:
    assert checks.pair_key("pos_meas") == checks.pair_key("vel_meas") != checks.pair_key("pos_filt")
    assert checks.pair_key("motor_state.q") == checks.pair_key("motor_state.dq")
    assert checks.pair_key("position") == checks.pair_key("speed")
