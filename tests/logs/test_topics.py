from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import robots
from logs import topics
from logs.topics import TARGETS, TOPICS, CameraModel
from robots.errors import UnknownNameError, UserError
from robots.signals import robot_signals

SPEC = robots.load("unitree_h1_2")
JOINTS = SPEC.joint_names
QUAT_WXYZ = np.array([0.8, 0.1, -0.3, 0.5])


def topic_named(name: str) -> topics.TopicSpec:
    return next(t for t in TOPICS if t.name == name)


def signals_of(topic: topics.TopicSpec) -> dict[str, tuple[int, ...]]:
    return {c.signal: topics.signal_shape(SPEC, c.signal, JOINTS) for c in topic.columns}


def wire(message: Any, msgtype: str) -> Any:
    """The message after it went through serialisation."""
    store = topics.typestore()
    return store.deserialize_cdr(store.serialize_cdr(message, msgtype), msgtype)


def test_every_robot_signal_has_a_topic() -> None:
    carried = {c.signal for t in TOPICS for c in t.columns}
    assert set(robot_signals(SPEC)) <= carried
    assert {"wrench", TARGETS} <= carried


def test_table_names_as_many_paths_as_the_signal_has_elements() -> None:
    for topic in TOPICS:
        for column in topic.columns:
            if not column.per_joint:
                assert (len(column.paths),) == topics.signal_shape(SPEC, column.signal, JOINTS)
                assert len(set(column.paths)) == len(column.paths)


def test_table_agrees_with_the_order_that_the_signals_declare() -> None:
    declared = robot_signals(SPEC)
    for topic in TOPICS:
        for column in topic.columns:
            if column.signal in declared and column.signal.startswith("imu"):
                assert tuple(p.rpartition(".")[2] for p in column.paths) == declared[column.signal].order


@pytest.mark.parametrize("topic", TOPICS, ids=lambda t: t.name)
@settings(max_examples=20, deadline=None, database=None)
@given(data=st.data())
def test_signals_survive_a_message(topic: topics.TopicSpec, data: st.DataObject) -> None:
    shapes = signals_of(topic)
    chosen = data.draw(st.sets(st.sampled_from(sorted(shapes)), min_size=1))
    finite = st.floats(-1e6, 1e6, width=32)
    signals = {n: data.draw(arrays(np.float32, shapes[n], elements=finite)) for n in sorted(chosen)}
    message = wire(topics.encode(topic, signals, JOINTS, 1_234_567_890_123_456_789), topic.msgtype)
    back = topics.decode(topic, message, JOINTS)
    assert set(back) == chosen
    for name, value in signals.items():
        np.testing.assert_array_equal(back[name], value.astype(np.float64))
    assert (message.header.stamp.sec, message.header.stamp.nanosec) == (1_234_567_890, 123_456_789)


def test_quaternion_reaches_ros_by_component() -> None:
    message = wire(topics.encode(topic_named("/imu"), {"imu_quat": QUAT_WXYZ}, JOINTS, 0), "sensor_msgs/msg/Imu")
    q = message.orientation
    assert (q.w, q.x, q.y, q.z) == tuple(QUAT_WXYZ)


def test_quaternion_is_x_y_z_w_on_the_wire() -> None:
    message = topics.encode(topic_named("/imu"), {"imu_quat": QUAT_WXYZ}, JOINTS, 0)
    raw = bytes(topics.typestore().serialize_cdr(message, "sensor_msgs/msg/Imu"))
    assert np.roll(QUAT_WXYZ, -1).astype("<f8").tobytes() in raw
    assert QUAT_WXYZ.astype("<f8").tobytes() not in raw


def test_a_scalar_last_quaternion_does_not_pass_for_a_scalar_first_one() -> None:
    scalar_last = np.roll(QUAT_WXYZ, -1)
    message = topics.encode(topic_named("/imu"), {"imu_quat": scalar_last}, JOINTS, 0)
    assert message.orientation.w != QUAT_WXYZ[0]
    assert not np.array_equal(topics.decode(topic_named("/imu"), message, JOINTS)["imu_quat"], QUAT_WXYZ)


def test_joint_order_of_a_message_does_not_matter() -> None:
    topic = topic_named("/joint_states")
    q = np.arange(len(JOINTS), dtype=np.float64)
    order = np.random.default_rng(0).permutation(len(JOINTS))
    message = topics.encode(topic, {"joint_pos": q[order]}, [JOINTS[i] for i in order], 0)
    np.testing.assert_array_equal(topics.decode(topic, message, JOINTS)["joint_pos"], q)


def test_a_missing_joint_is_named() -> None:
    topic = topic_named("/joint_states")
    message = topics.encode(topic, {"joint_pos": np.zeros(2)}, JOINTS[:2], 0)
    with pytest.raises(UserError, match=JOINTS[2]):
        topics.decode(topic, message, JOINTS[:3])


def test_absent_imu_quantities_are_marked_and_not_decoded() -> None:
    message = topics.encode(topic_named("/imu"), {"imu_gyro": np.array([1.0, 2.0, 3.0])}, JOINTS, 0)
    assert message.orientation_covariance[0] == -1.0
    assert message.angular_velocity_covariance[0] == 0.0
    assert set(topics.decode(topic_named("/imu"), message, JOINTS)) == {"imu_gyro"}


def test_messages_of_another_library_work_too() -> None:
    def vector(names: str) -> SimpleNamespace:
        return SimpleNamespace(**dict.fromkeys(names, 0.0))

    header = SimpleNamespace(stamp=SimpleNamespace(sec=0, nanosec=0), frame_id="")
    message = SimpleNamespace(header=header, twist=SimpleNamespace(linear=vector("xyz"), angular=vector("xyz")))
    command = np.array([0.5, -0.25, 0.125])
    topics.encode(topic_named("/cmd_vel"), {"command": command}, JOINTS, 5, "pelvis", message)
    assert (message.twist.linear.x, message.twist.linear.y, message.twist.angular.z) == tuple(command)
    assert message.header.frame_id == "pelvis"
    np.testing.assert_array_equal(topics.decode(topic_named("/cmd_vel"), message, JOINTS)["command"], command)


def test_unknown_signal_lists_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="joint_pos"):
        topics.signal_shape(SPEC, "joint_pso", JOINTS)


@pytest.mark.parametrize(
    ("signal", "stream"),
    [("rgb_front", "/camera/front/color"), ("depth_wrist", "/camera/wrist/depth"), ("rgb_", None), ("imu_quat", None)],
)
def test_camera_signals_have_their_own_topics(signal: str, stream: str | None) -> None:
    assert topics.image_stream(signal) == stream


def test_images_survive_a_message() -> None:
    rng = np.random.default_rng(0)
    rgb = rng.integers(0, 256, (4, 6, 3), dtype=np.uint8)
    depth = rng.random((5, 3)).astype(np.float32)
    for image in (rgb, depth):
        np.testing.assert_array_equal(
            topics.decode_image(wire(topics.encode_image(image, 0, "front"), topics.IMAGE)), image
        )


def image_message(pixels: np.ndarray, encoding: str, width: int, padding: int = 0, big: bool = False) -> Any:
    height = len(pixels)
    rows = pixels.reshape(height, -1).view(np.uint8)
    message = topics.blank(topics.IMAGE)
    message.height, message.width, message.encoding, message.is_bigendian = height, width, encoding, int(big)
    message.step = rows.shape[1] + padding
    message.data = np.pad(rows, ((0, 0), (0, padding)), constant_values=99).ravel()
    return message


def test_bgr_images_are_turned_and_padded_rows_are_cut() -> None:
    rgb = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    message = image_message(np.ascontiguousarray(rgb[..., ::-1]), "bgr8", width=4, padding=5)
    np.testing.assert_array_equal(topics.decode_image(message), rgb)


@pytest.mark.parametrize("order", ["<", ">"])
def test_depth_in_millimetres_becomes_metres(order: str) -> None:
    millimetres = np.array([[0, 1500], [65535, 2]], dtype=order + "u2")
    depth = topics.decode_image(image_message(millimetres, "16UC1", width=2, big=order == ">"))
    np.testing.assert_allclose(depth, [[0.0, 1.5], [65.535, 0.002]], rtol=1e-6)


def test_images_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match="uint8"):
        topics.encode_image(np.zeros((2, 2, 3), dtype=np.float32), 0, "")
    with pytest.raises(UnknownNameError, match="bgr8"):
        topics.decode_image(image_message(np.zeros((2, 4), np.uint8), "bgr9", width=4))
    short = image_message(np.zeros((2, 4), np.uint8), "mono8", width=4)
    short.data = short.data[:-1]
    with pytest.raises(UserError, match="does not fit"):
        topics.decode_image(short)


def test_camera_info_holds_the_projection() -> None:
    camera = CameraModel(width=8, height=6, fx=7.0, fy=5.0, cx=4.0, cy=3.0)
    info = wire(topics.camera_info(camera, 0, "front"), topics.CAMERA_INFO)
    point = np.array([0.5, -0.25, 2.0, 1.0])
    u, v, w = info.p.reshape(3, 4) @ point
    assert (u / w, v / w) == (7.0 * 0.25 + 4.0, 5.0 * -0.125 + 3.0)
    np.testing.assert_array_equal(info.k.reshape(3, 3), info.p.reshape(3, 4)[:, :3])
