import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mcap.reader import make_reader
from rosbags.highlevel import AnyReader

import robots
from logs import CameraModel, LogWriter, open_log, read_images, read_signal
from logs.topics import TARGETS
from robots.errors import UnknownNameError, UserError

SPEC = robots.load("unitree_h1_2")
JOINTS = len(SPEC.joint_names)
START_NS = 1_700_000_000_123_456_789
STEP_NS = 20_000_001
CAMERA = CameraModel(width=6, height=4, fx=5.0, fy=5.0, cx=3.0, cy=2.0)


def random_signals(rng: np.random.Generator) -> dict[str, np.ndarray]:
    quat = rng.normal(size=4).astype(np.float32)
    shapes = {"joint_pos": JOINTS, "joint_vel": JOINTS, "joint_effort": JOINTS}
    shapes |= {"imu_gyro": 3, "imu_accel": 3, "command": 3, "wrench": 6}
    return {
        "imu_quat": quat / np.linalg.norm(quat),
        **{name: rng.normal(size=size).astype(np.float32) for name, size in shapes.items()},
    }


def write_log(path: Path, steps: int = 5, info: dict[str, str] | None = None) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    written = []
    with LogWriter(path, SPEC, info=info) as log:
        for i in range(steps):
            signals = random_signals(rng)
            targets = rng.normal(size=JOINTS)
            log.write(START_NS + i * STEP_NS, signals, targets)
            written.append({**signals, TARGETS: targets})
    return written


def test_every_signal_comes_back_bit_for_bit(tmp_path: Path) -> None:
    written = write_log(tmp_path / "log")
    log = open_log(tmp_path / "log")
    assert log.problems == ()
    assert log.format == "rosbag2 mcap"
    for name in written[0]:
        series = read_signal(log, name)
        np.testing.assert_array_equal(series.values, np.array([w[name] for w in written], dtype=np.float64))
        np.testing.assert_array_equal(series.stamp_ns, START_NS + STEP_NS * np.arange(5))


def test_images_and_camera_models_come_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rgb = rng.integers(0, 256, (3, 4, 6, 3), dtype=np.uint8)
    depth = rng.random((3, 4, 6)).astype(np.float32)
    with LogWriter(tmp_path / "log", SPEC, cameras={"front": CAMERA}) as log:
        for i in range(3):
            log.write(i, {"rgb_front": rgb[i], "depth_front": depth[i]})
    read = open_log(tmp_path / "log")
    for stream, images in (("color", rgb), ("depth", depth)):
        frames = list(read_images(read, f"/camera/front/{stream}/image_raw"))
        assert [stamp for stamp, _ in frames] == [0, 1, 2]
        np.testing.assert_array_equal(np.stack([image for _, image in frames]), images)
        assert read.channel(f"/camera/front/{stream}/camera_info", "k").values[0, 0] == CAMERA.fx


def test_a_camera_without_a_model_gets_no_camera_info(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "log", SPEC) as log:
        log.write(0, {"rgb_front": np.zeros((2, 2, 3), dtype=np.uint8)})
    assert list(open_log(tmp_path / "log").topics) == ["/camera/front/color/image_raw"]


def test_measurement_and_arrival_are_kept_apart(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "log", SPEC) as log:
        log.write(1_000, {"command": np.zeros(3)}, receive_ns=1_500)
    topic = open_log(tmp_path / "log").topic("/cmd_vel")
    assert topic.header_ns is not None
    assert topic.receive_ns is not None
    assert (topic.header_ns[0], topic.receive_ns[0]) == (1_000, 1_500)
    assert topic.stamp_ns is topic.header_ns


def test_frames_name_the_imu_and_the_base(tmp_path: Path) -> None:
    write_log(tmp_path / "log", steps=1)
    log = open_log(tmp_path / "log")
    assert (log.topic("/imu").frame, log.topic("/cmd_vel").frame) == (SPEC.imu_site, SPEC.base_body)


def test_fewer_joints_are_written_by_name(tmp_path: Path) -> None:
    legs = SPEC.group("legs")
    with LogWriter(tmp_path / "log", SPEC, target_joints=legs) as log:
        log.write(1, {"joint_pos": np.arange(JOINTS)}, targets=np.arange(len(legs)))
    log_read = open_log(tmp_path / "log")
    assert log_read.channel("/joint_commands", "position").names == legs
    assert read_signal(log_read, TARGETS, legs[::-1]).values.tolist() == [list(range(len(legs)))[::-1]]
    with pytest.raises(UserError, match="lacks the joints"):
        read_signal(log_read, TARGETS, SPEC.joint_names)


def test_the_log_says_whose_it_is(tmp_path: Path) -> None:
    write_log(tmp_path / "log", info={"task": "velocity"})
    info = open_log(tmp_path / "log").info
    assert info == {"robot": SPEC.name, "model_hash": SPEC.model_hash, "task": "velocity"}


def test_other_readers_accept_the_log(tmp_path: Path) -> None:
    write_log(tmp_path / "log", steps=7)
    with AnyReader([tmp_path / "log"]) as reader:
        assert reader.message_count == 7 * 5
        assert {c.msgtype for c in reader.connections} >= {"sensor_msgs/msg/JointState", "sensor_msgs/msg/Imu"}
        for connection, _, raw in reader.messages():
            reader.deserialize(raw, connection.msgtype)
    with (tmp_path / "log" / "log.mcap").open("rb") as file:
        assert len(list(make_reader(file, validate_crcs=True).iter_messages())) == 7 * 5


def test_a_log_is_never_overwritten(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    before = {p: p.read_bytes() for p in (tmp_path / "log").iterdir()}
    with pytest.raises(UserError, match="not overwritten"):
        LogWriter(tmp_path / "log", SPEC)
    assert {p: p.read_bytes() for p in (tmp_path / "log").iterdir()} == before


def test_a_log_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log", SPEC)
    (tmp_path / "log").mkdir()
    with pytest.raises(UserError, match="not overwritten"), writer:
        pass
    assert list((tmp_path / "log").iterdir()) == []


def test_an_impossible_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot create"), LogWriter(tmp_path / "file" / "log", SPEC):
        pass


def test_an_error_in_the_block_completes_the_log(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), LogWriter(tmp_path / "log", SPEC) as log:  # noqa: PT012
        log.write(1, {"command": np.ones(3)})
        raise KeyboardInterrupt
    read = open_log(tmp_path / "log")
    assert read.problems == ()
    assert read.topic("/cmd_vel").count == 1


def test_a_log_without_messages_can_be_opened(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "log", SPEC):
        pass
    log = open_log(tmp_path / "log")
    assert log.topics == {}
    assert any("no messages" in p for p in log.problems)


@pytest.mark.parametrize(
    ("stamp", "signals", "error", "text"),
    [
        (0, {"imu_quat": np.zeros(3)}, UserError, r"expected shape \(4,\), found \(3,\)"),
        (0, {"joint_pos": np.zeros((1, JOINTS))}, UserError, "expected shape"),
        (0, {"joint_positions": np.zeros(JOINTS)}, UnknownNameError, "joint_pos"),
        (0, {"rgb_front": np.zeros((4, 4))[0]}, UserError, "an image must be"),
        (-1, {"command": np.zeros(3)}, UserError, "does not fit"),
        (2**31 * 10**9, {"command": np.zeros(3)}, UserError, "does not fit"),
    ],
)
def test_what_cannot_be_written_is_refused_and_the_rest_kept(
    tmp_path: Path, stamp: int, signals: dict[str, np.ndarray], error: type[Exception], text: str
) -> None:
    with LogWriter(tmp_path / "log", SPEC) as log:
        log.write(1, {"command": np.zeros(3)})
        with pytest.raises(error, match=text):
            log.write(stamp, signals)
        log.write(2, {"command": np.zeros(3)})
    assert open_log(tmp_path / "log").topic("/cmd_vel").count == 2


def test_a_closed_log_takes_nothing(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log", SPEC)
    with pytest.raises(UserError, match="not open"):
        writer.write(0, {"command": np.zeros(3)})
    with writer:
        pass
    writer.close()
    with pytest.raises(UserError, match="not open"):
        writer.write(0, {"command": np.zeros(3)})


def test_unknown_joints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="left_knee"):
        LogWriter(tmp_path / "log", SPEC, joints=["left_kne"])
    assert not (tmp_path / "log").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
import robots
from logs import LogWriter
with LogWriter(Path(sys.argv[1]), robots.load("unitree_h1_2"), flush_period=1.0) as log:
    for i in range(501):
        log.write(i * 10_000_000, {"command": np.full(3, i, dtype=float)})
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_loses_no_more_than_the_flush_period(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "log")],
        env={**os.environ, "PYTHONPATH": str(Path(robots.__file__).parents[1])},
        check=False,
    )
    assert result.returncode == -signal.SIGKILL
    log = open_log(tmp_path / "log")
    values = log.series("/cmd_vel", "twist.linear", "x")
    assert len(values) >= 400
    np.testing.assert_array_equal(values, np.arange(len(values)))
    assert any("metadata.yaml is missing" in p for p in log.problems)
    assert any("cut off" in p for p in log.problems)


def test_a_full_disk_is_said_and_what_was_flushed_stays_readable(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    count = 0
    try:
        with pytest.raises(UserError, match="stays readable") as caught, LogWriter(tmp_path / "log", SPEC) as log:  # noqa: PT012
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
            for count in range(10_000):
                log.write(count * 10_000_000, {"command": np.full(3, count, dtype=float)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(tmp_path / "log") in str(caught.value)
    assert (tmp_path / "log" / "log.mcap").stat().st_size <= 300_000
    read = open_log(tmp_path / "log")
    values = read.series("/cmd_vel", "twist.linear", "x")
    assert len(values) > 0.8 * count
    np.testing.assert_array_equal(values, np.arange(len(values)))
    assert read.problems


def test_a_disk_that_fills_up_at_the_end_is_said(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(UserError, match="could not write"), LogWriter(tmp_path / "log", SPEC) as log:  # noqa: PT012
            log.write(0, {"command": np.zeros(3)})
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "log" / "metadata.yaml").exists()


def test_logs_need_neither_torch_nor_mujoco() -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['mujoco'] = None; import logs, logs.inspect, logs.plot"
    environment = {**os.environ, "PYTHONPATH": str(Path(robots.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
