import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logs import Log, Topic, open_log
from robots.errors import UserError


def read(tmp_path: Path, text: str | bytes, suffix: str = ".csv") -> Log:
    path = tmp_path / f"log{suffix}"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return open_log(path)


def table(log: Log) -> Topic:
    return log.topic("log")


def nanoseconds_of(log: Log) -> list[int]:
    stamps = table(log).header_ns
    assert stamps is not None
    return [int(s) for s in stamps]


def test_columns_that_differ_in_a_number_form_one_channel(tmp_path: Path) -> None:
    log = read(tmp_path, "time,jpos0,jpos1,jpos0_des,jpos1_des,kp\n0,1,2,3,4,20\n1,5,6,7,8,20\n")
    topic = table(log)
    assert {c.field: c.names for c in topic.channels.values()} == {
        "jpos": ("0", "1"),
        "jpos_des": ("0", "1"),
        "kp": ("",),
    }
    np.testing.assert_array_equal(topic.channel("jpos_des").values, [[3, 4], [7, 8]])


def test_columns_that_end_in_components_form_one_channel(tmp_path: Path) -> None:
    topic = table(read(tmp_path, "t,quat_x,quat_y,quat_z,quat_w,gyro.x,gyro.y,gyro.z,max\n0,1,2,3,4,5,6,7,8\n"))
    assert topic.channel("quat").names == ("x", "y", "z", "w")
    np.testing.assert_array_equal(topic.channel("quat").select("wxyz"), [[4, 1, 2, 3]])
    assert topic.channel("gyro").names == ("x", "y", "z")
    assert topic.channel("max").names == ("",)


def test_the_separator_goes_with_the_number(tmp_path: Path) -> None:
    topic = table(read(tmp_path, "t,- arm_1_joint_position,- arm_2_joint_position,- lift_position\n0,1,2,3\n"))
    assert set(topic.channels) == {"arm_joint_position", "lift_position"}


def test_a_unit_in_brackets_is_kept(tmp_path: Path) -> None:
    log = read(tmp_path, "time (ms),torque [Nm]\n0,1\n5,2\n")
    assert table(log).channel("torque").unit == "Nm"
    assert nanoseconds_of(log) == [0, 5_000_000]


@pytest.mark.parametrize(
    ("header", "cells", "nanoseconds", "said"),
    [
        ("time", ["0", "0.005", "0.01"], [0, 5_000_000, 10_000_000], "taken for s"),
        ("t_ms", ["0", "5", "10"], [0, 5_000_000, 10_000_000], ""),
        ("timestamp_us", ["0", "5000", "10000"], [0, 5_000_000, 10_000_000], ""),
        ("Time [ns]", ["0", "5000000", "10000000"], [0, 5_000_000, 10_000_000], ""),
        ("stamp", ["0", "5", "10"], [0, 5_000_000, 10_000_000], "taken for ms"),
        ("stamp", ["0", "5000", "10000"], [0, 5_000_000, 10_000_000], "taken for us"),
        ("stamp", ["0", "5000000", "10000000"], [0, 5_000_000, 10_000_000], "taken for ns"),
        ("t", ["1700000000.000000001", "1700000000.5"], [1700000000000000001, 1700000000500000000], "s since 1970"),
        ("t", ["1700000000000", "1700000000005"], [1700000000000000000, 1700000000005000000], "ms since 1970"),
        ("t", ["1700000000000000", "1700000000000005"], [1700000000000000000, 1700000000000005000], "us since 1970"),
        ("t", ["1700000000000000001", "1700000000000000003"], [1700000000000000001, 1700000000000000003], "ns since"),
    ],
)
def test_time_is_exact_and_its_unit_said_where_it_is_guessed(
    tmp_path: Path, header: str, cells: list[str], nanoseconds: list[int], said: str
) -> None:
    log = read(tmp_path, f"{header},q\n" + "".join(f"{c},1\n" for c in cells))
    assert nanoseconds_of(log) == nanoseconds
    assert log.problems == ()
    assert [said in n for n in log.notes] == ([True] if said else [])


@settings(max_examples=50, deadline=None, database=None)
@given(stamps=st.lists(st.integers(0, 2**62), min_size=2, max_size=20))
def test_nanosecond_stamps_survive(tmp_path_factory: pytest.TempPathFactory, stamps: list[int]) -> None:
    text = "time_ns,q\n" + "".join(f"{s},0\n" for s in stamps)
    assert nanoseconds_of(read(tmp_path_factory.mktemp("csv"), text)) == stamps


def test_without_a_time_column_there_are_no_stamps(tmp_path: Path) -> None:
    log = read(tmp_path, "timeout,q\n1,2\n3,4\n")
    assert (table(log).stamp_ns, table(log).clock, table(log).seconds()) == (None, "none", None)
    assert set(table(log).channels) == {"timeout", "q"}
    assert any("no time column" in n for n in log.notes)


def test_a_table_without_header_is_said(tmp_path: Path) -> None:
    log = read(tmp_path, "0.0,1.5\n0.1,2.5\n")
    assert table(log).count == 2
    assert any("no header row" in n for n in log.notes)


def test_rows_of_the_wrong_length_are_left_out_and_named(tmp_path: Path) -> None:
    log = read(tmp_path, "t,q,qd\n0,1,2\n0.1,1\n0.2,3,4\n0.3,1,2,3\n\n0.4,5,6\n")
    np.testing.assert_array_equal(table(log).channel("q").values[:, 0], [1, 3, 5])
    assert log.problems == ("log.csv: 2 rows do not have 3 cells and are left out (at 3, 5)",)


def test_a_table_that_was_cut_off_in_a_row_keeps_the_rows_before(tmp_path: Path) -> None:
    text = "t,q,qd\n" + "".join(f"{i * 0.01},{i},{-i}\n" for i in range(100))
    log = read(tmp_path, text[:-8])
    assert table(log).count == 99
    assert len(log.problems) == 1


def test_cells_that_are_no_numbers_are_nan_and_named(tmp_path: Path) -> None:
    log = read(tmp_path, "t,q,qd\n0,1,nan\n0.1,abc,2\n0.2,,inf\n0.3,4,-inf\n")
    np.testing.assert_array_equal(table(log).channel("q").values[:, 0], [1, np.nan, np.nan, 4])
    np.testing.assert_array_equal(table(log).channel("qd").values[:, 0], [np.nan, 2, np.inf, -np.inf])
    assert log.problems == ("log: 1 cells of 'q' are no numbers ('abc'; at 3): NaN there",)
    assert any("1 cells of 'q' are empty" in n for n in log.notes)


def test_rows_without_time_are_left_out_and_named(tmp_path: Path) -> None:
    log = read(tmp_path, "t_s,q\n0,1\n,2\nnan,3\n1e30,4\n1e15,4\n0.3,5\n")
    np.testing.assert_array_equal(table(log).channel("q").values[:, 0], [1, 5])
    assert log.problems == ("log: 4 rows have no time and are left out (at 3, 4, 5, ...)",)


def test_a_time_column_of_text_gives_no_stamps(tmp_path: Path) -> None:
    log = read(tmp_path, "time,q\nnoon,1\nlater,2\n")
    assert table(log).stamp_ns is None
    assert table(log).count == 2
    assert any("holds no numbers" in p for p in log.problems)


def test_a_column_of_text_is_left_out_and_said(tmp_path: Path) -> None:
    log = read(tmp_path, "t,mode,q\n0,idle,1\n1,walk,2\n")
    assert set(table(log).channels) == {"q"}
    assert log.problems == ()
    assert any("'mode' holds text" in n for n in log.notes)


def test_stamps_stay_in_file_order(tmp_path: Path) -> None:
    assert nanoseconds_of(read(tmp_path, "t_s,q\n2,1\n1,2\n1,3\n")) == [2 * 10**9, 10**9, 10**9]


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_other_delimiters_byte_order_marks_and_quotes_are_understood(tmp_path: Path, delimiter: str) -> None:
    text = "\ufeff" + delimiter.join(["t", '"q one"']) + "\r\n" + delimiter.join(["0", "1.5"]) + "\r\n"
    assert table(read(tmp_path, text)).channel("q one").values.tolist() == [[1.5]]


def test_repeated_and_empty_column_names_are_kept_apart(tmp_path: Path) -> None:
    topic = table(read(tmp_path, "t,q,q,,load [%],load [A]\n0,1,2,3,4,5\n"))
    assert sorted(float(v) for c in topic.channels.values() for v in c.values.ravel()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "content",
    [b"\x00\x01\x02\x03" * 50, b"just some words\nand more words\n", b"a,b,c\n", b"\n\n\n", b"\xff\xfe\xfd\xfc"],
)
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match=r"log\.csv"):
        read(tmp_path, content)


def test_a_cell_without_end_stops_the_reading_there(tmp_path: Path) -> None:
    log = read(tmp_path, 't,q\n0,1\n1,2\n2,"' + "9" * 200_000)
    assert table(log).count == 2
    assert any("beyond line" in p for p in log.problems)


def test_bytes_that_are_no_text_are_counted(tmp_path: Path) -> None:
    log = read(tmp_path, b"t,q\n0,1\n1,\xff\xfe\n2,3\n")
    assert any("2 bytes are no UTF-8" in p for p in log.problems)
    np.testing.assert_array_equal(table(log).channel("q").values[:, 0], [1, np.nan, 3])


@settings(max_examples=60, deadline=None, database=None)
@given(content=st.binary(min_size=1, max_size=300))
def test_any_bytes_are_read_or_refused_in_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    for suffix in (".csv", ".json", ".mcap", ".db3"):
        with contextlib.suppress(UserError):
            log = read(tmp_path_factory.mktemp("any"), content, suffix)
            assert sum(t.count for t in log.topics.values()) or log.problems


def bench(entries: int = 20) -> str:
    rows = [{"timestamp": i * 0.005, "position": i, "load": 65530 + i, "on": True} for i in range(entries)]
    return json.dumps({"mass": 0.49, "motor": "xl330", "kp": 100, "entries": rows})


def test_bench_entries_become_channels(tmp_path: Path) -> None:
    log = read(tmp_path, bench(), ".json")
    assert (log.format, log.problems) == ("json", ())
    assert log.info == {"mass": "0.49", "motor": "xl330", "kp": "100"}
    assert nanoseconds_of(log) == [i * 5_000_000 for i in range(20)]
    np.testing.assert_array_equal(table(log).channel("on").values[:, 0], np.ones(20))


@pytest.mark.parametrize("cut", [1, 5, 30, 300])
def test_a_cut_off_bench_log_keeps_its_whole_entries(tmp_path: Path, cut: int) -> None:
    text = bench()
    log = read(tmp_path, text[:-cut], ".json")
    whole = text[:-cut].count("}")
    assert table(log).count == whole
    assert log.info["motor"] == "xl330"
    assert any(f"first {whole} entries" in p for p in log.problems)


def test_entries_with_missing_or_odd_values_are_said(tmp_path: Path) -> None:
    entries = [{"timestamp": 0.0, "q": 1}, {"timestamp": 0.1}, 7, {"timestamp": 0.2, "q": [1]}, {"q": 3}]
    log = read(tmp_path, json.dumps({"entries": entries}), ".json")
    np.testing.assert_array_equal(table(log).channel("q").values[:, 0], [1, np.nan, np.nan])
    assert len(log.problems) == 3
    assert any("1 cells of 'q' are empty" in n for n in log.notes)


@pytest.mark.parametrize(
    "text", ["{}", "[1, 2]", '{"entries": []}', '{"entries": 3}', "{", '{"entries": [', "[" * 9999]
)
def test_json_without_entries_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="entries"):
        read(tmp_path, text, ".json")


def test_real_bench_logs_carry_their_settings(robot_logs: Path) -> None:
    settings_seen = {
        (log.info["trajectory"], log.info["kp"])
        for log in map(open_log, sorted((robot_logs / "bam_xl330" / "raw").glob("*.json")))
    }
    trajectories = {"sin_sin", "lift_and_drop", "up_and_down", "sin_time_square"}
    assert settings_seen == {(t, k) for t in trajectories for k in ("100", "200", "400", "800")}


def test_real_table_without_time_has_twelve_joints(robot_logs: Path) -> None:
    name = "20250617_motor_response_real_200Hz"
    topic = open_log(robot_logs / "go2_air_genesis_lr" / f"{name}.csv").topic(name)
    assert (topic.count, topic.stamp_ns) == (11_509, None)
    assert {c.field: len(c.names) for c in topic.channels.values()} == {
        "state": 1,
        "jpos": 12,
        "jvel": 12,
        "jpos_des": 12,
        "kp": 1,
        "kd": 1,
    }
