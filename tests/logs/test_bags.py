import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer

from logs import Log, open_log, topics
from robots.errors import UserError

COUNT = 3000
STEP_NS = 2_000_000
TOPIC = next(t for t in topics.TOPICS if t.name == "/cmd_vel")


def write_bag(
    path: Path, plugin: StoragePlugin, mode: CompressionMode = CompressionMode.NONE, count: int = COUNT
) -> Path:
    """A bag of /cmd_vel messages whose first value counts up; in MCAP they fill several chunks."""
    writer = Writer(path, version=9, storage_plugin=plugin)
    writer.set_compression(mode, CompressionFormat.ZSTD)
    store = topics.typestore()
    with writer:
        connection = writer.add_connection(TOPIC.name, TOPIC.msgtype, typestore=store)
        for i in range(count):
            message = topics.encode(TOPIC, {"command": np.array([i, 0.5, -0.5])}, (), i * STEP_NS, "x" * 1000)
            writer.write(connection, i * STEP_NS, store.serialize_cdr(message, TOPIC.msgtype))
    return next(p for p in path.iterdir() if p.name != "metadata.yaml")


@pytest.fixture(scope="module")
def mcap(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_bag(tmp_path_factory.mktemp("bags") / "bag", StoragePlugin.MCAP).read_bytes()


@pytest.fixture(scope="module")
def small_mcap(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_bag(tmp_path_factory.mktemp("bags") / "bag", StoragePlugin.MCAP, count=20).read_bytes()


@pytest.fixture(scope="module")
def db3(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_bag(tmp_path_factory.mktemp("bags") / "bag", StoragePlugin.SQLITE3).read_bytes()


def counters(log: Log) -> np.ndarray:
    return log.series("/cmd_vel", "twist.linear", "x")


def opened(folder: Path, data: bytes, suffix: str) -> Log:
    path = folder / f"log{suffix}"
    path.write_bytes(data)
    return open_log(path)


@pytest.mark.parametrize(
    ("plugin", "mode"),
    [(StoragePlugin.MCAP, m) for m in CompressionMode]
    + [(StoragePlugin.SQLITE3, m) for m in CompressionMode if m != CompressionMode.STORAGE],
)
def test_every_kind_of_bag_is_read_in_full(tmp_path: Path, plugin: StoragePlugin, mode: CompressionMode) -> None:
    write_bag(tmp_path / "bag", plugin, mode, count=50)
    log = open_log(tmp_path / "bag")
    assert (log.problems, log.format) == ((), f"rosbag2 {plugin.name.lower()}")
    np.testing.assert_array_equal(counters(log), np.arange(50))
    np.testing.assert_array_equal(log.topic("/cmd_vel").header_ns, np.arange(50) * STEP_NS)


@pytest.mark.parametrize("share", [0.02, 0.25, 0.5, 0.75, 0.9, 0.97])
def test_a_cut_off_mcap_is_read_up_to_the_cut(tmp_path: Path, mcap: bytes, share: float) -> None:
    log = opened(tmp_path, mcap[: int(share * len(mcap))], ".mcap")
    values = counters(log)
    np.testing.assert_array_equal(values, np.arange(len(values)))
    # All that is lost is the message at the cut; the index takes the last few per cent of the file.
    assert len(values) > 0.97 * share * COUNT - 1
    assert any("cut off" in p for p in log.problems)


def test_an_mcap_that_lost_only_its_last_bytes_is_complete_but_not_sound(tmp_path: Path, mcap: bytes) -> None:
    log = opened(tmp_path, mcap[:-4], ".mcap")
    np.testing.assert_array_equal(counters(log), np.arange(COUNT))
    assert log.problems


@pytest.mark.parametrize("size", [1, 7, 8, 9, 30, 60])
def test_an_mcap_with_nothing_but_its_head_says_so(tmp_path: Path, mcap: bytes, size: int) -> None:
    log = opened(tmp_path, mcap[:size], ".mcap")
    assert log.topics == {}
    assert any("no messages" in p for p in log.problems)


def test_a_damaged_record_head_costs_one_message(tmp_path: Path, mcap: bytes) -> None:
    data = bytearray(mcap)
    at = data.index(b"\x05", data.index(b"x" * 1000) + 1000)
    while data[at + 1 : at + 9] != data[at + 1 : at + 3] + bytes(6):
        at = data.index(b"\x05", at + 1)
    data[at] = 0xEE
    log = opened(tmp_path, bytes(data), ".mcap")
    values = counters(log)
    assert len(values) == COUNT - 1
    assert len(np.setdiff1d(np.arange(COUNT), values)) == 1
    assert any("1 messages in the chunk" in p for p in log.problems)
    assert any(f"{COUNT - 1} of {COUNT} messages" in p for p in log.problems)


def test_a_chunk_without_its_message_index_is_read_from_its_front(tmp_path: Path, small_mcap: bytes) -> None:
    # The index of the only chunk follows it directly and begins with opcode 7, length 2 + 4 + 16 * 20.
    head = bytes([7]) + (6 + 16 * 20).to_bytes(8, "little")
    assert small_mcap.count(head) == 1
    log = opened(tmp_path, small_mcap.replace(head, bytes([0x17]) + head[1:]), ".mcap")
    np.testing.assert_array_equal(counters(log), np.arange(20))


def test_a_damaged_compressed_chunk_costs_that_chunk_only(tmp_path: Path) -> None:
    data = bytearray(write_bag(tmp_path / "bag", StoragePlugin.MCAP, CompressionMode.STORAGE).read_bytes())
    frame = data.index(b"\x28\xb5\x2f\xfd")
    data[frame : frame + 4] = bytes(4)
    log = opened(tmp_path, bytes(data), ".mcap")
    values = counters(log)
    assert 0 < len(values) < COUNT
    np.testing.assert_array_equal(values, np.arange(COUNT - len(values), COUNT))
    assert any("can't be unpacked" in p for p in log.problems)


def test_wrong_first_bytes_are_said_and_the_rest_is_read(tmp_path: Path, mcap: bytes) -> None:
    log = opened(tmp_path, b"\x00" + mcap[1:], ".mcap")
    np.testing.assert_array_equal(counters(log), np.arange(COUNT))
    assert any("first bytes" in p for p in log.problems)


@settings(max_examples=60, deadline=None, database=None)
@given(data=st.data())
def test_flipped_bytes_never_crash_and_never_pass_unsaid(
    tmp_path_factory: pytest.TempPathFactory, small_mcap: bytes, data: st.DataObject
) -> None:
    damaged = bytearray(small_mcap)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] ^= data.draw(st.integers(1, 255))
    log = opened(tmp_path_factory.mktemp("flip"), bytes(damaged), ".mcap")
    read = sum(t.count for t in log.topics.values() if t.channels)
    assert read <= 20
    assert read == 20 or log.problems


@settings(max_examples=40, deadline=None, database=None)
@given(size=st.integers(0, 30_000))
def test_any_cut_leaves_a_prefix(tmp_path_factory: pytest.TempPathFactory, small_mcap: bytes, size: int) -> None:
    cut = small_mcap[: max(1, size % len(small_mcap))]
    log = opened(tmp_path_factory.mktemp("cut"), cut, ".mcap")
    assert log.problems
    if "/cmd_vel" in log.topics and log.topic("/cmd_vel").count:
        values = counters(log)
        np.testing.assert_array_equal(values, np.arange(len(values)))


def test_a_database_with_a_damaged_page_is_read_from_both_ends(tmp_path: Path, db3: bytes) -> None:
    data = bytearray(db3)
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 4096] = b"\xff" * 4096
    log = opened(tmp_path, bytes(data), ".db3")
    values = counters(log)
    assert COUNT - 20 < len(values) < COUNT
    assert (values[0], values[-1]) == (0, COUNT - 1)
    assert (np.diff(values) > 0).all()
    assert any("damaged" in p for p in log.problems)


@pytest.mark.parametrize(("share", "kept"), [(0.1, 0.0), (0.7, 0.68), (0.9, 0.88)])
def test_a_cut_off_database_is_read_as_far_as_its_tree_goes(
    tmp_path: Path, db3: bytes, share: float, kept: float
) -> None:
    log = opened(tmp_path, db3[: int(share * len(db3))], ".db3")
    values = counters(log)
    assert kept * COUNT <= len(values) <= share * COUNT
    np.testing.assert_array_equal(values, np.arange(len(values)))
    assert any("was cut off" in p for p in log.problems)


def test_a_database_without_messages_table_is_no_bag(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "log.db3") as database:
        database.execute("CREATE TABLE recipes (id INTEGER)")
    database.close()
    with pytest.raises(UserError, match="not a rosbag2 file"):
        open_log(tmp_path / "log.db3")


def test_a_view_in_place_of_a_table_is_not_run(tmp_path: Path, db3: bytes) -> None:
    path = tmp_path / "log.db3"
    path.write_bytes(db3)
    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE messages RENAME TO hidden")
        database.execute("CREATE VIEW messages AS SELECT * FROM hidden")
    database.close()
    with pytest.raises(UserError, match="not a rosbag2 file"):
        open_log(path)


def test_a_header_of_a_database_alone_is_refused(tmp_path: Path, db3: bytes) -> None:
    with pytest.raises(UserError, match="can't be read"):
        opened(tmp_path, db3[:50], ".db3")


def test_messages_that_only_the_write_ahead_file_holds_are_read(tmp_path: Path, db3: bytes) -> None:
    live = tmp_path / "live.db3"
    live.write_bytes(db3)
    database = sqlite3.connect(live)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("UPDATE messages SET timestamp = timestamp + 7")
    database.commit()
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{live}{suffix}", tmp_path / f"log.db3{suffix}")
    database.close()
    before = sorted(p.name for p in tmp_path.iterdir())
    log = open_log(tmp_path / "log.db3")
    np.testing.assert_array_equal(log.topic("/cmd_vel").receive_ns, np.arange(COUNT) * STEP_NS + 7)
    assert any("log.db3-wal" in n for n in log.notes)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_rows_without_a_topic_are_counted(tmp_path: Path, db3: bytes) -> None:
    path = tmp_path / "log.db3"
    path.write_bytes(db3)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE messages SET topic_id = 99 WHERE id = 5")
        database.execute("UPDATE messages SET data = 'text' WHERE id = 6")
    database.close()
    log = open_log(path)
    assert len(counters(log)) == COUNT - 2
    assert any("2 rows" in p for p in log.problems)


def test_names_that_are_no_text_do_not_stop_the_reading(tmp_path: Path, db3: bytes) -> None:
    log = opened(tmp_path, db3.replace(b"/cmd_vel", b"/cmd_v\xff\xfe"), ".db3")
    assert sum(t.count for t in log.topics.values()) == COUNT


def test_a_stamp_beyond_the_range_is_damage(tmp_path: Path, small_mcap: bytes) -> None:
    stamp = (19 * STEP_NS).to_bytes(8, "little")
    log = opened(tmp_path, small_mcap.replace(stamp, b"\xff" * 8), ".mcap")
    np.testing.assert_array_equal(counters(log), np.arange(19))
    assert log.problems


def test_a_database_of_an_older_ros_without_definitions_is_read(tmp_path: Path, db3: bytes) -> None:
    path = tmp_path / "log.db3"
    path.write_bytes(db3)
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE message_definitions")
    database.close()
    np.testing.assert_array_equal(counters(open_log(path)), np.arange(COUNT))
