import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mcap.writer import Writer as McapWriter

from logs import Log, Topic, open_log, topics
from logs.bags import Findings, RawMessage, RawTopic
from logs.messages import Decoder, decode_all

JOINT_STATE = topics.JOINT_STATE


def raw_topic(msgtype: str, name: str = "/topic", **fields: str) -> RawTopic:
    return RawTopic(name=name, msgtype=msgtype, serialization=fields.pop("serialization", "cdr"), **fields)


def decoded(topic: RawTopic, messages: list[Any], found: Findings | None = None) -> dict[str, Topic]:
    found = found or Findings()
    found.declare(topic)
    store = topics.typestore()
    raw = [
        RawMessage(topic=topic, receive_ns=i, data=bytes(store.serialize_cdr(m, topic.msgtype)))
        for i, m in enumerate(messages)
    ]
    return decode_all(raw, found)


def joint_state(names: list[str], position: list[float], effort: list[float] | None = None, sec: int = 1) -> Any:
    message = topics.blank(JOINT_STATE)
    topics.stamp(message, sec * 10**9, "")
    message.name, message.position = names, np.array(position, dtype=np.float64)
    message.effort = np.array(effort or [], dtype=np.float64)
    return message


def test_joints_in_another_order_are_matched_by_name() -> None:
    found = Findings()
    messages = [joint_state(["a", "b"], [1, 2]), joint_state(["b", "a"], [4, 3])]
    topic = decoded(raw_topic(JOINT_STATE), messages, found)["/topic"]
    assert topic.channel("position").names == ("a", "b")
    np.testing.assert_array_equal(topic.channel("position").values, [[1, 2], [3, 4]])
    assert any("matched by name" in n for n in found.notes)


def test_publishers_of_different_joints_are_kept_apart() -> None:
    messages = [joint_state(["a", "b"], [1, 2]), joint_state(["c"], [3]), joint_state(["a", "b"], [4, 5])]
    result = decoded(raw_topic(JOINT_STATE), messages)
    np.testing.assert_array_equal(result["/topic"].channel("position").values, [[1, 2], [4, 5]])
    assert result["/topic#2"].channel("position").names == ("c",)
    assert [t.count for t in result.values()] == [2, 1]


def test_an_array_that_is_sometimes_empty_is_nan_there() -> None:
    found = Findings()
    messages = [joint_state(["a", "b"], [1, 2], effort=[5, 6]), joint_state(["a", "b"], [3, 4])]
    effort = decoded(raw_topic(JOINT_STATE), messages, found)["/topic"].channel("effort").values
    np.testing.assert_array_equal(effort, [[5, 6], [np.nan, np.nan]])
    assert any("effort is empty in 1 of 2" in n for n in found.notes)


def test_an_array_that_is_always_empty_is_no_channel() -> None:
    topic = decoded(raw_topic(JOINT_STATE), [joint_state(["a"], [1])])["/topic"]
    assert set(topic.channels) == {"position"}


def test_a_joint_named_twice_is_said() -> None:
    found = Findings()
    topic = decoded(raw_topic(JOINT_STATE), [joint_state(["a", "a"], [1, 2])], found)["/topic"]
    assert topic.channel("position").names == ("0", "1")
    assert any("names a joint twice" in p for p in found.problems)


def test_header_stamps_that_were_never_filled_are_not_used() -> None:
    found = Findings()
    topic = decoded(raw_topic(JOINT_STATE), [joint_state(["a"], [1], sec=0)] * 3, found)["/topic"]
    assert (topic.header_ns, topic.clock) == (None, "receive")
    np.testing.assert_array_equal(topic.stamp_ns, [0, 1, 2])
    assert any("never filled" in n for n in found.notes)


def test_vectors_arrays_and_nested_messages_become_channels() -> None:
    odometry = topics.blank("nav_msgs/msg/Odometry")
    odometry.pose.pose.position.y = 2.5
    odometry.pose.covariance[7] = 0.5
    topic = decoded(raw_topic("nav_msgs/msg/Odometry"), [odometry])["/topic"]
    assert topic.channel("pose.pose.position").names == ("x", "y", "z")
    assert topic.channel("pose.pose.orientation").names == ("x", "y", "z", "w")
    assert topic.channel("pose.pose.position").element("y").tolist() == [2.5]
    assert topic.channel("pose.covariance").element("7").tolist() == [0.5]


def test_arrays_of_messages_are_spread_out() -> None:
    trajectory = topics.blank("trajectory_msgs/msg/MultiDOFJointTrajectoryPoint")
    for x in (1.0, 2.0):
        transform = topics.blank("geometry_msgs/msg/Transform")
        transform.translation.x = x
        trajectory.transforms.append(transform)
    topic = decoded(raw_topic("trajectory_msgs/msg/MultiDOFJointTrajectoryPoint"), [trajectory])["/topic"]
    np.testing.assert_array_equal(topic.channel("transforms.translation").values, [[1, 0, 0, 2, 0, 0]])
    assert topic.channel("time_from_start").names == ("ns",)


def test_arrays_of_changing_length_are_left_out_and_said() -> None:
    found = Findings()
    scans = []
    for length in (3, 4):
        scan = topics.blank("sensor_msgs/msg/LaserScan")
        scan.ranges = np.ones(length, dtype=np.float32)
        scans.append(scan)
    topic = decoded(raw_topic("sensor_msgs/msg/LaserScan"), scans, found)["/topic"]
    assert "ranges" not in topic.channels
    assert topic.channel("range_max").values.dtype == np.float32
    assert any("between 3 and 4 elements" in n for n in found.notes)


def test_numbers_keep_their_type() -> None:
    message = topics.blank("std_msgs/msg/Int64")
    message.data = 2**60 + 1
    topic = decoded(raw_topic("std_msgs/msg/Int64"), [message])["/topic"]
    assert topic.channel("data").values.tolist() == [[2**60 + 1]]


def test_text_alone_makes_a_topic_without_channels() -> None:
    topic = decoded(raw_topic("std_msgs/msg/String"), [topics.blank("std_msgs/msg/String")])["/topic"]
    assert (topic.count, topic.channels) == (1, {})


def test_a_declared_topic_without_messages_is_listed() -> None:
    topic = decoded(raw_topic("sensor_msgs/msg/Imu"), [])["/topic"]
    assert topic.count == 0
    assert topic.channel("angular_velocity").values.shape == (0, 3)


def test_images_are_kept_as_checksums() -> None:
    images = [topics.encode_image(np.full((2, 2, 3), v, dtype=np.uint8), 1, "") for v in (0, 0, 1)]
    checksums = decoded(raw_topic(topics.IMAGE), images)["/topic"].channel("data.crc32").values[:, 0]
    assert checksums[0] == checksums[1] != checksums[2]


def test_messages_that_can_not_be_decoded_are_counted() -> None:
    found = Findings()
    topic = raw_topic(JOINT_STATE)
    found.declare(topic)
    good = bytes(topics.typestore().serialize_cdr(joint_state(["a"], [1]), JOINT_STATE))
    bad = [b"", b"\x00\x01", good[:-3], b"\x00\x01\x00\x00" + b"\xff" * 40]
    result = decode_all([RawMessage(topic=topic, receive_ns=0, data=d) for d in [*bad, good]], found)
    assert result["/topic"].count == 1
    assert sum(int(p.split(": ")[1].split()[0]) for p in found.problems) == len(bad)


@pytest.mark.parametrize(
    ("topic", "text"),
    [
        (raw_topic("my_msgs/msg/Secret"), "no definition"),
        (raw_topic(JOINT_STATE, serialization="protobuf"), "only cdr"),
        (raw_topic(""), "no ROS 2 message type"),
        (raw_topic("a/msg/B'); import os; ('"), "no ROS 2 message type"),
        (raw_topic("my_msgs/msg/Bad", definition_format="ros2msg", definition="float64 x; import os\n"), "parse"),
        (raw_topic("my_msgs/msg/Open", definition_format="ros2msg", definition="other_msgs/Thing x\n"), "other_msgs"),
    ],
)
def test_types_that_make_no_sense_are_said_and_their_messages_counted(topic: RawTopic, text: str) -> None:
    found = Findings()
    found.declare(topic)
    result = decode_all([RawMessage(topic=topic, receive_ns=i, data=b"") for i in range(4)], found)
    assert (result["/topic"].count, result["/topic"].channels) == (4, {})
    np.testing.assert_array_equal(result["/topic"].receive_ns, range(4))
    assert len(found.problems) == 1
    assert text in found.problems[0]


def test_a_message_type_that_contains_itself_is_refused() -> None:
    topic = raw_topic("my_msgs/msg/Loop", definition_format="ros2msg", definition="my_msgs/Loop inner\n")
    with pytest.raises(RecursionError):
        Decoder(topic)


def test_a_type_of_the_users_own_is_decoded_from_its_definition() -> None:
    topic = raw_topic(
        "my_msgs/msg/Motor", definition_format="ros2msg", definition="float32 q\nint16[2] temperature\nstring note\n"
    )
    found = Findings()
    found.declare(topic)
    data = b"\x00\x01\x00\x00" + struct.pack("<fhhI", 0.5, 30, -5, 1) + b"\x00"
    result = decode_all([RawMessage(topic=topic, receive_ns=0, data=data)], found)["/topic"]
    assert found.problems == []
    assert result.channel("q").values.tolist() == [[0.5]]
    assert result.channel("temperature").values.tolist() == [[30, -5]]


def test_an_idl_definition_is_decoded() -> None:
    idl = "module my_msgs {\n  module msg {\n    struct Pair {\n      double a;\n      double b;\n    };\n  };\n};\n"
    definition = "=" * 80 + "\nIDL: my_msgs/msg/Pair\n" + idl
    topic = raw_topic("my_msgs/msg/Pair", definition_format="ros2idl", definition=definition)
    found = Findings()
    found.declare(topic)
    data = b"\x00\x01\x00\x00" + struct.pack("<dd", 1.5, -2.0)
    result = decode_all([RawMessage(topic=topic, receive_ns=0, data=data)], found)["/topic"]
    assert found.problems == []
    assert (result.channel("a").values[0, 0], result.channel("b").values[0, 0]) == (1.5, -2.0)


def foreign_log(path: Path, chunked: bool) -> Log:
    """An MCAP file of another writer, with one topic that is no ROS message."""
    with path.open("wb") as file:
        writer = McapWriter(file, use_chunking=chunked)
        writer.start("ros2")
        definition, _ = topics.typestore().generate_msgdef("std_msgs/msg/Float64", ros_version=2)
        schema = writer.register_schema("std_msgs/msg/Float64", "ros2msg", definition.encode())
        channel = writer.register_channel("/voltage", "cdr", schema)
        other = writer.register_channel("/other", "json", writer.register_schema("thing", "jsonschema", b"{}"))
        for i in range(5):
            data = b"\x00\x01\x00\x00" + struct.pack("<d", i / 2)
            writer.add_message(channel, log_time=i * 1000, publish_time=0, data=data)
            writer.add_message(other, log_time=i * 1000, publish_time=0, data=b"{}")
        writer.finish()  # type: ignore[no-untyped-call]
    return open_log(path)


@pytest.mark.parametrize("chunked", [True, False])
def test_files_of_other_writers_are_read(tmp_path: Path, chunked: bool) -> None:
    log = foreign_log(tmp_path / "log.mcap", chunked)
    np.testing.assert_array_equal(log.channel("/voltage", "data").values[:, 0], np.arange(5) / 2)
    np.testing.assert_array_equal(log.topic("/voltage").receive_ns, np.arange(5) * 1000)
    assert log.topic("/other").count == 5
    assert len(log.problems) == 1
    assert "/other" in log.problems[0]
