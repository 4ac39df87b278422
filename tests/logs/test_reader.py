from pathlib import Path

import numpy as np
import pytest
import yaml

import robots
from logs import Log, LogWriter, open_log, read_images
from robots.errors import UnknownNameError, UserError

SPEC = robots.load("unitree_h1_2")


def write_log(path: Path, count: int = 10, start: int = 0) -> Path:
    with LogWriter(path, SPEC) as log:
        for i in range(start, start + count):
            log.write(i * 1_000_000, {"command": np.full(3, i, dtype=float)})
    return path


def edit_metadata(path: Path, **changes: object) -> None:
    file = path / "metadata.yaml"
    content = yaml.safe_load(file.read_text())
    content["rosbag2_bagfile_information"].update(changes)
    file.write_text(yaml.safe_dump(content))


def counters(log: Log) -> list[float]:
    return [float(v) for v in log.series("/cmd_vel", "twist.linear", "x")]


def test_a_bare_storage_file_is_read(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    log = open_log(tmp_path / "log" / "log.mcap")
    assert (log.format, counters(log), log.problems) == ("mcap", list(range(10)), ())


def test_content_decides_before_the_suffix(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    (tmp_path / "log" / "log.mcap").rename(tmp_path / "log.csv")
    assert open_log(tmp_path / "log.csv").format == "mcap"


def test_a_missing_log_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no log"):
        open_log(tmp_path / "nothing")


@pytest.mark.parametrize("suffix", [".mcap", ".db3", ".csv", ".json", ""])
def test_an_empty_file_is_said(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"log{suffix}").write_bytes(b"")
    with pytest.raises(UserError, match="is empty"):
        open_log(tmp_path / f"log{suffix}")


def test_a_folder_without_storage_is_said(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("hello")
    with pytest.raises(UserError, match="rosbag2 directory"):
        open_log(tmp_path)


@pytest.mark.parametrize("start", [b"PAR1", b"PK\x03\x04", b"\x28\xb5\x2f\xfd"])
def test_formats_that_are_not_read_are_named(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "log").write_bytes(start + bytes(100))
    with pytest.raises(UserError, match="not read here"):
        open_log(tmp_path / "log")


def test_without_metadata_the_storage_is_read(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log")
    (path / "metadata.yaml").unlink()
    log = open_log(path)
    assert counters(log) == list(range(10))
    assert any("metadata.yaml is missing" in p for p in log.problems)


@pytest.mark.parametrize("text", ["", "- a list", "{unclosed", "rosbag2_bagfile_information: 3", "\x00\x01"])
def test_metadata_that_make_no_sense_are_said_and_the_storage_is_read(tmp_path: Path, text: str) -> None:
    path = write_log(tmp_path / "log")
    (path / "metadata.yaml").write_text(text)
    log = open_log(path)
    assert counters(log) == list(range(10))
    assert any("can't be understood" in p for p in log.problems)


def test_metadata_run_nothing(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log")
    proof = tmp_path / "proof"
    (path / "metadata.yaml").write_text(f"!!python/object/apply:os.mkdir ['{proof}']")
    assert any("can't be understood" in p for p in open_log(path).problems)
    assert not proof.exists()


def test_metadata_that_point_outside_the_folder_are_not_followed(tmp_path: Path) -> None:
    write_log(tmp_path / "other", count=3)
    path = write_log(tmp_path / "log")
    edit_metadata(path, relative_file_paths=["../other/other.mcap"])
    log = open_log(path)
    assert counters(log) == list(range(10))
    assert any("other.mcap" in p for p in log.problems)


def test_metadata_that_promise_more_are_contradicted(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log")
    content = yaml.safe_load((path / "metadata.yaml").read_text())
    entries = content["rosbag2_bagfile_information"]["topics_with_message_count"]
    entries[0]["message_count"] = 12
    edit_metadata(path, topics_with_message_count=entries)
    assert any("promises 12 messages, 10 could be read" in p for p in open_log(path).problems)


def test_a_split_recording_is_joined_and_a_missing_part_named(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log")
    second = write_log(tmp_path / "second", start=10)
    (second / "second.mcap").rename(path / "log_1.mcap")
    edit_metadata(path, relative_file_paths=["log.mcap", "log_1.mcap", "log_2.mcap"], topics_with_message_count=[])
    log = open_log(path)
    assert counters(log) == list(range(20))
    assert log.problems == ("log_2.mcap, which metadata.yaml lists, is missing",)


def test_one_bad_part_does_not_cost_the_others(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log")
    (path / "log_1.mcap").write_bytes(b"")
    (path / "log_2.mcap.zstd").write_bytes(b"not compressed")
    names = ["log_1.mcap", "log_2.mcap.zstd", "log.mcap"]
    edit_metadata(path, relative_file_paths=names, topics_with_message_count=[])
    log = open_log(path)
    assert counters(log) == list(range(10))
    assert len(log.problems) == 2
    assert "log_1.mcap is empty" in log.problems


def test_storage_beside_the_listed_files_is_mentioned(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log")
    (path / "extra.mcap").write_bytes((path / "log.mcap").read_bytes())
    log = open_log(path)
    assert counters(log) == list(range(10))
    assert any("extra.mcap" in n for n in log.notes)


def test_if_nothing_of_a_folder_can_be_read_that_is_an_error(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log")
    (path / "log.mcap").write_bytes(b"")
    with pytest.raises(UserError, match="is empty"):
        open_log(path)


def test_reading_leaves_the_log_alone(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log")
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in path.iterdir()}
    open_log(path)
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in path.iterdir()} == before


def test_images_are_asked_for_by_topic(tmp_path: Path) -> None:
    log = open_log(write_log(tmp_path / "log"))
    with pytest.raises(UserError, match="no images"):
        next(read_images(log, "/cmd_vel"))
    with pytest.raises(UnknownNameError, match="/cmd_vel"):
        next(read_images(log, "/camera"))


def test_unknown_names_list_the_nearest(tmp_path: Path) -> None:
    log = open_log(write_log(tmp_path / "log"))
    with pytest.raises(UnknownNameError, match="/cmd_vel"):
        log.topic("/cmd_val")
    with pytest.raises(UnknownNameError, match=r"twist\.linear"):
        log.channel("/cmd_vel", "twist.liner")
    with pytest.raises(UnknownNameError, match="x"):
        log.series("/cmd_vel", "twist.linear", "xx")


def test_real_bags_hold_what_their_tables_hold(robot_logs: Path) -> None:
    folder = robot_logs / "dfki_double_pendulum"
    bag = open_log(folder / "rosbag2_mcap_trajectory_00")
    table = open_log(folder / "design_A.0_20220815_trajectory_00.csv").topic("design_A.0_20220815_trajectory_00")
    states = bag.topic("/joint_states")
    assert bag.problems == ()
    for field, column in (("position", "pos_meas"), ("velocity", "vel_meas"), ("effort", "tau_meas")):
        np.testing.assert_array_equal(states.channel(field).values, table.channel(column).values)
    assert states.stamp_ns is not None
    assert table.stamp_ns is not None
    assert np.abs(states.stamp_ns - states.stamp_ns[0] - table.stamp_ns).max() <= 1


def test_every_real_log_is_read_in_full(robot_logs: Path) -> None:
    files = [p for s in ("*.csv", "*.json", "*.mcap", "*.db3") for p in robot_logs.rglob(s)]
    folders = [p.parent for p in robot_logs.rglob("metadata.yaml")]
    assert files
    for path in [*files, *folders]:
        log = open_log(path)
        assert log.problems == (), path
        assert all(t.count for t in log.topics.values()), path
