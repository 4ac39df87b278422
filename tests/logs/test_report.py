from pathlib import Path

import numpy as np
import pytest

import robots
from logs import Channel, Topic, open_log
from logs.report import named_rate, report_topic

SPEC = robots.load("unitree_h1_2")
COUNT = 2000


def topic_of(**channels: np.ndarray) -> Topic:
    """A table at 200 Hz."""
    named = {n: Channel(field=n, names=tuple(str(i) for i in range(v.shape[1])), values=v) for n, v in channels.items()}
    stamps = np.arange(COUNT, dtype=np.int64) * 5_000_000
    return Topic(name="/joint_states", msgtype="csv", count=COUNT, channels=named, header_ns=stamps)


def wave(columns: int = 2) -> np.ndarray:
    return np.sin(np.linspace(0, 60, COUNT)[:, None] * np.arange(1, columns + 1))


def test_known_faults_are_counted_exactly() -> None:
    position, effort = wave(), 2.0 * wave()
    position[100:107, 0] = np.nan
    position[300, 1] = np.inf
    effort[:, 1] = np.clip(effort[:, 1], -3.0, 1.0)
    report = report_topic(topic_of(position=position, effort=effort, command=np.repeat(wave()[::4], 4, axis=0)))
    channels = {c.field: c for c in report.channels}
    assert [(e.nan, e.inf) for e in channels["position"].elements] == [(7, 0), (0, 1)]
    assert channels["effort"].elements[0].saturation == ()
    (saturation,) = channels["effort"].elements[1].saturation
    assert (saturation.kind, saturation.value) == ("maximum", 1.0)
    assert saturation.samples == int((2.0 * wave()[:, 1] >= 1.0).sum())
    assert channels["command"].held is not None
    assert channels["command"].held.rows == 4
    assert channels["position"].held is None


def test_rows_that_repeat_in_every_field_are_counted() -> None:
    position, velocity = wave(), wave()
    position[50:53] = position[49]
    velocity[50:52] = velocity[49]
    velocity[700] = velocity[699]
    assert report_topic(topic_of(position=position, velocity=velocity)).repeated_rows == 2


def test_constant_elements_are_marked() -> None:
    values = wave()
    values[:, 1] = 3.0
    elements = report_topic(topic_of(position=values)).channels[0].elements
    assert [e.constant for e in elements] == [False, True]
    assert (elements[1].minimum, elements[1].maximum) == (3.0, 3.0)


def test_a_channel_without_a_finite_value_has_no_range() -> None:
    element = report_topic(topic_of(position=np.full((COUNT, 1), np.nan))).channels[0].elements[0]
    assert np.isnan([element.minimum, element.maximum]).all()
    assert (element.nan, element.constant) == (COUNT, False)


def test_limits_of_the_robot_are_matched_by_joint_name() -> None:
    knee = SPEC.joint("left_knee_joint")
    values = np.zeros((COUNT, 2))
    values[10:25, 0] = knee.effort_limit
    channel = Channel(field="effort", names=("left_knee_joint", "tail_joint"), values=values)
    topic = Topic(name="/joint_states", msgtype="", count=COUNT, channels={"effort": channel})
    elements = report_topic(topic, SPEC).channels[0].elements
    assert [(s.kind, s.value, s.longest) for s in elements[0].saturation] == [("limit", knee.effort_limit, 15)]
    assert elements[1].saturation == ()
    assert report_topic(topic).channels[0].elements[0].saturation == ()


def test_wrapped_values_are_unwrapped_before_they_are_compared() -> None:
    load = np.round(np.clip(1200 * wave(1), -885, 885))
    element = report_topic(topic_of(load=np.where(load < 0, load + 65536, load))).channels[0].elements[0]
    assert element.wrapped_bits == 16
    assert {s.value for s in element.saturation} == {-885.0, 885.0}


def test_a_command_may_rest_at_its_largest_value() -> None:
    report = report_topic(topic_of(target_position=np.clip(2.0 * wave(), -1, 1)))
    assert all(e.saturation == () for e in report.channels[0].elements)


def test_fields_are_paired_by_name_only_if_their_elements_agree() -> None:
    time = np.arange(COUNT)[:, None] * 0.005
    position, velocity = np.sin(3 * time), 3 * np.cos(3 * time)
    assert set(report_topic(topic_of(pos_meas=position, vel_meas=velocity)).clock_ratios) == {"pos_meas"}
    assert report_topic(topic_of(pos_meas=position, vel_filt=velocity)).clock_ratios == {}
    assert report_topic(topic_of(pos_meas=position, vel_meas=np.repeat(velocity, 2, axis=1))).clock_ratios == {}


def test_a_quaternion_in_the_wrong_order_is_reported() -> None:
    quat = np.tile([0.0, 1.0, 0.0, 0.0], (COUNT, 1))
    accel = np.tile([0.0, 0.0, 9.81], (COUNT, 1))
    topic = Topic(
        name="/imu",
        msgtype="sensor_msgs/msg/Imu",
        count=COUNT,
        channels={
            "orientation": Channel(field="orientation", names=("x", "y", "z", "w"), values=np.roll(quat, -1, axis=1)),
            "linear_acceleration": Channel(field="linear_acceleration", names=("x", "y", "z"), values=accel),
        },
    )
    assert report_topic(topic).quaternions["orientation"].misplaced


@pytest.mark.parametrize(
    ("name", "rate"),
    [("real_200Hz.csv", 200.0), ("run 62.5 hz.csv", 62.5), ("run.csv", None), ("0hz.csv", None)],
)
def test_a_rate_in_the_file_name(name: str, rate: float | None) -> None:
    assert named_rate(Path(name)) == rate


def test_the_clock_of_the_real_quadruped_log_runs_slow(robot_logs: Path) -> None:
    folder = robot_logs / "go2_air_genesis_lr"
    table = open_log(folder / "20250617_motor_response_real_200Hz.csv")
    report = report_topic(next(iter(table.topics.values())), None, named_rate(table.path))
    ratio = report.clock_ratios["jpos"]
    assert report.clock == "file name"
    assert ratio.implied * 1e3 == pytest.approx(4.40, abs=0.01)
    assert ratio.spread * ratio.period * 1e3 == pytest.approx(0.07, abs=0.01)
    assert len(ratio.elements) == 12
    assert ratio.faulty
    held = {c.field: c.held for c in report.channels}["jpos_des"]
    assert held is not None
    assert (held.rows, held.matching, held.intervals) == (4, 2864, 2876)


def test_sound_clocks_of_real_logs_are_not_blamed(robot_logs: Path) -> None:
    checked = 0
    for path in [p for s in ("*.csv", "*.json", "*.mcap", "*.db3") for p in robot_logs.rglob(s)]:
        if "go2" not in str(path):
            for topic in open_log(path).topics.values():
                for ratio in report_topic(topic).clock_ratios.values():
                    assert not ratio.faulty, path
                    checked += 1
    assert checked > 20


def test_real_rates_and_jitter_are_those_of_their_description(robot_logs: Path) -> None:
    tiago = report_topic(open_log(robot_logs / "tiago_figaroh" / "rosbag2_sqlite3").topic("/joint_states")).timing
    assert tiago is not None
    assert tiago.duration == pytest.approx(80.2, abs=0.05)
    assert tiago.period * 1e3 == pytest.approx(9.997, abs=1e-3)
    assert (tiago.period_p1 * 1e3, tiago.period_p99 * 1e3) == pytest.approx((8.7, 11.4), abs=0.05)
    name = "control_method_gravity_compensation_data_measured"
    pendulum = report_topic(open_log(robot_logs / "dfki_simple_pendulum" / f"{name}.csv").topic(name)).timing
    assert pendulum is not None
    assert pendulum.rate == pytest.approx(1000, rel=1e-2)


def test_the_real_motor_load_is_signed(robot_logs: Path) -> None:
    log = open_log(robot_logs / "bam_xl330" / "raw" / "2026-01-15_10h29m47.json")
    channels = {c.field: c for c in report_topic(next(iter(log.topics.values()))).channels}
    load = channels["load"].elements[0]
    assert load.wrapped_bits == 16
    assert {s.value for s in load.saturation} == {-885.0, 885.0}
