import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.gait import GaitConfig, advance_phase, foot_phases, standing, swing_progress

PHASES = st.floats(0, 1, exclude_max=True, width=32)
CONFIGS = st.builds(GaitConfig, period=st.floats(0.4, 2.0), stance=st.floats(0.5, 0.8))
STEPS = st.sampled_from([0.002, 0.01, 0.02, 0.04])
law = settings(max_examples=100, deadline=None)


def advance(phase: float, stand: bool, dt: float, config: GaitConfig, steps: int = 1) -> list[float]:
    """The phases after each of some control steps."""
    now, out = np.array([phase], np.float32), []
    for _ in range(steps):
        now = advance_phase(now, np.array([stand]), dt, config)
        out.append(float(now[0]))
    return out


def far(a: float, b: float) -> float:
    """Distance of two phases on the circle."""
    return abs((a - b + 0.5) % 1 - 0.5)


@law
@given(PHASES, st.booleans(), STEPS, CONFIGS)
def test_the_phase_stays_on_the_circle(phase, stand, dt, config):
    trace = advance(phase, stand, dt, config, 50)
    assert all(0 <= p < 1 for p in trace)


@law
@given(PHASES, STEPS, CONFIGS)
def test_a_walking_phase_advances_by_the_time_over_the_period(phase, dt, config):
    assert far(advance(phase, False, dt, config)[0], phase + dt / config.period) < 1e-6


@law
@given(PHASES, STEPS, CONFIGS)
def test_a_walk_returns_to_where_it_was_after_a_period(phase, dt, config):
    config = GaitConfig(period=round(config.period / dt) * dt, stance=config.stance)
    assert far(advance(phase, False, dt, config, round(config.period / dt))[-1], phase) < 1e-4


@law
@given(PHASES, STEPS, CONFIGS)
def test_a_standing_robot_halts_within_half_a_period_with_both_feet_down(phase, dt, config):
    trace = advance(phase, True, dt, config, int(np.ceil(config.period / 2 / dt)) + 1)
    halted = trace[-1]
    assert halted in (0.0, 0.5)
    assert advance(halted, True, dt, config, 10) == [halted] * 10
    assert (swing_progress(foot_phases(np.array([halted], np.float32)), config) == 0).all()


@law
@given(PHASES, STEPS, CONFIGS)
def test_halting_finishes_the_step_under_way_without_turning_back(phase, dt, config):
    trace = advance(phase, True, dt, config, int(np.ceil(config.period / 2 / dt)) + 1)
    ahead = [(p - phase) % 1 for p in trace]
    assert all(a <= b + 1e-6 for a, b in itertools.pairwise(ahead)) or phase in (0.0, 0.5)
    assert ahead[-1] <= 0.5 + 1e-6


@law
@given(st.sampled_from([0.0, 0.5]), STEPS, CONFIGS)
def test_a_halted_clock_resumes_where_it_stopped(halted, dt, config):
    advance(halted, True, dt, config, 5)
    assert advance(halted, False, dt, config)[0] == pytest.approx(halted + dt / config.period, abs=1e-6)


@law
@given(PHASES)
def test_the_feet_are_half_a_cycle_apart(phase):
    left, right = foot_phases(np.array([phase], np.float32))[0]
    assert left == np.float32(phase)
    assert 0 <= right < 1
    assert far(left, right) == pytest.approx(0.5, abs=1e-6)


@law
@given(PHASES, CONFIGS)
def test_at_least_one_foot_stands_always(phase, config):
    progress = swing_progress(foot_phases(np.array([phase], np.float32)), config)
    assert (progress == 0).any()
    assert ((progress >= 0) & (progress <= 1)).all()


@law
@given(PHASES, STEPS, CONFIGS)
def test_the_mirrored_walk_is_the_same_walk_half_a_cycle_later(phase, dt, config):
    other = (phase + 0.5) % 1
    assert far(advance(phase, False, dt, config)[0] + 0.5, advance(other, False, dt, config)[0]) < 1e-6
    for stand in (False, True):
        here, there = advance(phase, stand, dt, config, 20)[-1], advance(other, stand, dt, config, 20)[-1]
        assert far(here + 0.5, there) < 1e-4 or far(phase * 2, 0) < 1e-5


def test_the_timeline_of_the_docstring():
    trace = advance(0.48, True, 0.016, GaitConfig(period=0.8), 3)
    assert trace == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([0, 0, 0], True),
        ([0.05, 0, 0.05], True),
        ([0.11, 0, 0], False),
        ([0, 0, -0.11], False),
        ([-0.08, 0.08, 0], False),
    ],
)
def test_small_commands_ask_to_stand(command, expected):
    assert standing(np.array([command], np.float32), GaitConfig(stand_below=0.1)).tolist() == [expected]


def test_swing_progress_rises_from_lift_off_to_touch_down():
    phases = np.array([[0.0, 0.54, 0.55, 0.775, 0.999]], np.float32)
    np.testing.assert_allclose(swing_progress(phases, GaitConfig(stance=0.55)), [[0, 0, 0, 0.5, 0.998]], atol=1e-3)


def test_simulations_keep_their_own_time():
    phase, stand = np.array([0.1, 0.1, 0.49, 0.99], np.float32), np.array([False, True, True, True])
    out = advance_phase(phase, stand, 0.02, GaitConfig(period=0.8))
    np.testing.assert_allclose(out, [0.125, 0.125, 0.5, 0.0], atol=1e-6)
