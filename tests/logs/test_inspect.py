import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import robots
from logs import LogWriter, open_log
from logs.inspect import inspect, run_inspect, show
from robots.errors import UnknownNameError

SPEC = robots.load("unitree_h1_2")
JOINTS = len(SPEC.joint_names)
STEP_NS = 20_000_000
COUNT = 400


def write_faulty_log(path: Path) -> Path:
    """A log at 50 Hz with two gaps, a repeated stamp, a step back, NaN, a torque limit, a stuck and a held channel."""
    rng = np.random.default_rng(0)
    time = np.arange(COUNT) * STEP_NS * 1e-9
    frequency = np.linspace(1.0, 3.0, JOINTS)
    position = 0.2 * np.sin(time[:, None] * frequency)
    velocity = 0.2 * frequency * np.cos(time[:, None] * frequency)
    effort = rng.normal(size=(COUNT, JOINTS))
    effort[100:130, 0] = SPEC.joints[0].effort_limit
    effort[:, 1] = 0.0
    velocity[7, 2] = np.nan
    stamps = 10**18 + np.arange(COUNT) * STEP_NS
    stamps[200:] += 5 * STEP_NS
    stamps[300:] += 3 * STEP_NS
    stamps[50] = stamps[49]
    stamps[[60, 61]] = stamps[[61, 60]]
    with LogWriter(path, SPEC) as log:
        for i in range(COUNT):
            signals = {"joint_pos": position[i], "joint_vel": velocity[i], "joint_effort": effort[i]}
            log.write(int(stamps[i]), signals, targets=position[i // 5 * 5], receive_ns=int(stamps[i]) + 1_000_000)
    return path


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_faulty_log(tmp_path_factory.mktemp("logs") / "faulty")


def sentences(path: Path) -> list[str]:
    return [f"{f.level} {f.topic} {f.field}: {f.text}" for f in inspect(open_log(path), SPEC).findings]


def test_every_known_fault_is_said_with_its_count(faulty: Path) -> None:
    found = sentences(faulty)
    first, second = SPEC.joint_names[:2]
    limit = SPEC.joints[0].effort_limit
    expected = [
        "fault /joint_states : gaps longer than 50 ms (2.5 median periods): 2, at",
        "largest 120 ms, about 8 samples missing",
        "fault /joint_states : stamps that go back in time: 1",
        "fault /joint_states : stamps equal to the one before: 1",
        f"fault /joint_states velocity: nan values: 1 in {SPEC.joint_names[2]}",
        f"fault /joint_states effort: {first} sits at the robot's limit {limit:.4g} for up to 30 samples in a row",
        f"hint /joint_states effort: never changes in {second}",
        "info /joint_commands position: changes every 5 rows",
        "effective rate 10 Hz",
    ]
    for text in expected:
        assert any(text in s for s in found), (text, found)


def test_faults_come_first(faulty: Path) -> None:
    levels = [f.level for f in inspect(open_log(faulty)).findings]
    assert levels == sorted(levels, key=["fault", "hint", "info"].index)


def test_a_sound_log_has_no_faults(tmp_path: Path) -> None:
    rng, default = np.random.default_rng(0), SPEC.array("default_pos")
    with LogWriter(tmp_path / "log", SPEC) as log:
        for i in range(100):
            signals = {
                "imu_quat": np.array([1.0, 0, 0, 0]),
                "imu_accel": np.array([0, 0, 9.81]) + rng.normal(size=3) / 9,
            }
            log.write(i * STEP_NS, {**signals, "joint_pos": default + 0.01 * rng.normal(size=JOINTS)})
    assert [s for s in sentences(tmp_path / "log") if s.startswith("fault")] == []


def test_arrival_is_compared_with_the_header(faulty: Path) -> None:
    offset = inspect(open_log(faulty)).topics[0].offset
    assert offset is not None
    assert (offset.median, offset.lowest, offset.highest) == pytest.approx((1e-3, 1e-3, 1e-3))


def test_one_clock_twice_and_clocks_that_disagree_are_said(tmp_path: Path) -> None:
    for name, shift in (("same", 0), ("early", -3_000_000)):
        with LogWriter(tmp_path / name, SPEC) as log:
            for i in range(1, 20):
                log.write(i * STEP_NS, {"command": np.full(3, i)}, receive_ns=i * STEP_NS + shift)
    assert any("only one clock was recorded" in s for s in sentences(tmp_path / "same"))
    assert any("received up to 3 ms before it was stamped" in s for s in sentences(tmp_path / "early"))


def test_degrees_are_told_from_a_wrong_clock(tmp_path: Path) -> None:
    time = np.arange(2000) * 0.005
    rows = np.stack([time, np.degrees(np.sin(time * 3)), 3 * np.cos(time * 3)], axis=1)
    (tmp_path / "log.csv").write_text("time,pos,vel\n" + "".join(",".join(map(str, r)) + "\n" for r in rows))
    found = sentences(tmp_path / "log.csv")
    assert any("ratio 57.29" in s and "positions in degrees" in s for s in found)
    assert any("beyond 2 pi" in s for s in found)


def test_tables_name_topics_faults_notes_and_unreadable_parts(faulty: Path, tmp_path: Path) -> None:
    table = tmp_path / "log.csv"
    table.write_text("time,q [rad]\n0,1\n0.1,[bold]x\n0.2,3\n")
    out = io.StringIO()
    console = Console(file=out, width=200)
    for path in (faulty, table):
        show(inspect(open_log(path), SPEC), console)
    text = out.getvalue()
    for part in ("/joint_states", "50 Hz", "limits of unitree_h1_2", "fault /joint_states", "note  time column"):
        assert part in text
    assert "UNREADABLE log: 1 cells of 'q [rad]' are no numbers ('[bold]x'" in text


def test_tables_fit_a_narrow_terminal_without_cutting_anything(faulty: Path) -> None:
    out = io.StringIO()
    show(inspect(open_log(faulty), SPEC), Console(file=out, width=80))
    assert "\u2026" not in out.getvalue()
    assert all(len(line) <= 80 for line in out.getvalue().splitlines())


def test_a_ruin_is_not_listed_stone_by_stone(tmp_path: Path) -> None:
    columns = [f"part{chr(97 + i)}" for i in range(25)]
    rows = ["1", "x", "3", "4"]
    text = "time," + ",".join(columns) + "\n" + "".join(f"{i},{','.join([c] * 25)}\n" for i, c in enumerate(rows))
    (tmp_path / "log.csv").write_text(text)
    report = inspect(open_log(tmp_path / "log.csv"))
    assert len(report.problems) == 25
    out = io.StringIO()
    show(report, Console(file=out, width=200))
    assert out.getvalue().count("UNREADABLE") == 21
    assert "and 5 more places" in out.getvalue()


def test_the_report_as_json_is_standard_json(faulty: Path) -> None:
    report = inspect(open_log(faulty))
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    states = next(t for t in document["topics"] if t["name"] == "/joint_states")
    assert states["timing"]["gaps"] == 2
    assert states["timing"]["rate"] == pytest.approx(50)
    assert document["complete"] is True
    assert document["info"]["robot"] == SPEC.name


def test_one_bad_file_does_not_stop_the_others(
    faulty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, cut = tmp_path / "bad.mcap", tmp_path / "cut.mcap"
    bad.write_bytes(b"")
    cut.write_bytes((faulty / "faulty.mcap").read_bytes()[:-1000])
    assert run_inspect([bad, faulty, cut], as_json=True) == 1
    documents = json.loads(capsys.readouterr().out)
    assert [d["complete"] for d in documents] == [False, True, False]
    assert "is empty" in documents[0]["error"]
    assert documents[2]["problems"]
    assert sum(t["count"] for t in documents[2]["topics"]) > 0


def test_the_exit_code_tells_whether_everything_was_read(faulty: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=200)
    assert run_inspect([faulty], console=console) == 0
    assert run_inspect([tmp_path / "nothing", faulty], console=console) == 1
    assert "there is no log" in out.getvalue()


def test_the_robot_that_a_log_names_is_used_unless_another_is_given(
    faulty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_inspect([faulty], as_json=True)
    assert json.loads(capsys.readouterr().out)[0]["robot"] == SPEC.name
    with pytest.raises(UnknownNameError, match="unitree_h1_2"):
        run_inspect([faulty], robot="unitree_h1")


def test_every_log_gets_its_own_picture(faulty: Path, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("time,q\n0,1\n1,2\n2,0\n")
    files = [faulty, tmp_path / "table.csv"]
    assert run_inspect(files, plot=tmp_path / "page.png", console=Console(file=io.StringIO())) == 0
    assert {p.name for p in tmp_path.glob("*.png")} == {"page_faulty.png", "page_table.png"}


def test_every_real_log_can_be_inspected(robot_logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [p for s in ("*.csv", "*.json") for p in sorted(robot_logs.rglob(s))]
    files += [p.parent for p in robot_logs.rglob("metadata.yaml")]
    assert run_inspect(files, as_json=True) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(files)
