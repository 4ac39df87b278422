"""The signals that cross the border between a robot and a policy."""

import numpy as np
import pytest

import robots
from robots import UnknownNameError
from robots.signals import robot_signals, select

SPEC = robots.load("unitree_h1_2")
SIGNALS = robot_signals(SPEC)


def test_names_and_shapes():
    shapes = {name: signal.shape for name, signal in SIGNALS.items()}
    assert shapes == {
        "joint_pos": (27,),
        "joint_vel": (27,),
        "joint_effort": (27,),
        "imu_quat": (4,),
        "imu_gyro": (3,),
        "imu_accel": (3,),
        "command": (3,),
    }


def test_every_signal_says_its_unit_frame_age_and_type():
    units = {name: signal.unit for name, signal in SIGNALS.items()}
    assert units["joint_pos"] == "rad"
    assert units["joint_vel"] == "rad/s"
    assert units["joint_effort"] == "N m"
    assert units["imu_gyro"] == "rad/s"
    assert units["imu_accel"] == "m/s^2"
    for name, signal in SIGNALS.items():
        assert signal.name == name
        assert signal.frame
        assert signal.max_age > 0
        assert np.dtype(signal.dtype) == np.float32
        assert len(signal.order) == signal.shape[-1]


@pytest.mark.parametrize("name", ["joint_pos", "joint_vel", "joint_effort"])
def test_joint_signals_have_the_order_of_the_spec(name):
    assert SIGNALS[name].order == SPEC.joint_names


def test_quaternion_is_scalar_first():
    assert SIGNALS["imu_quat"].order == ("w", "x", "y", "z")


def test_select_keeps_the_order_asked_for():
    assert [s.name for s in select(SIGNALS, ["imu_gyro", "joint_pos"])] == ["imu_gyro", "joint_pos"]


def test_select_of_an_unknown_signal_names_the_nearest():
    with pytest.raises(UnknownNameError, match="unknown signal 'joint_position'; did you mean joint_pos"):
        select(SIGNALS, ["joint_position"])
