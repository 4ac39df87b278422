import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import robots
import tarsus
import tarsus_doctor
from robots.errors import UserError
from sim.backend import BACKENDS
from sim.tasks import TASKS

REPO = Path(__file__).parents[1]
COMMAND = [sys.executable, str(REPO / "tarsus.py")]


def run(*args: str | bytes, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, check=False, **options)


def all_commands() -> list[list[str]]:
    return [[c] for c in tarsus.COMMANDS if c != "log"] + [["log", c] for c in tarsus.LOG_COMMANDS]


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch):
    """Adds a command that raises the given exception."""

    def add(error: BaseException) -> None:
        def command(_args: object) -> int:
            raise error

        monkeypatch.setitem(tarsus.COMMANDS, "fail", (command, ""))

    return add


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A small regular log."""
    path = tmp_path / "log.csv"
    path.write_text("time,angle\n" + "".join(f"{0.01 * i:.2f},{i % 7}\n" for i in range(200)))
    return path


# help


@pytest.mark.parametrize("argument", ["--help", "-h"])
def test_help_lists_every_command(capsys, argument):
    assert tarsus.main([argument]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [c for c in tarsus.COMMANDS if not any(line.split()[:1] == [c] for line in printed)] == []


@pytest.mark.parametrize("args", [[], ["log"]])
def test_no_command_shows_help_and_is_an_error(capsys, args):
    assert tarsus.main(args) == 2
    assert "usage: tarsus" in capsys.readouterr().out


@pytest.mark.parametrize("args", all_commands(), ids=" ".join)
def test_every_command_has_help(capsys, args):
    assert tarsus.main([*args, "--help"]) == 0
    assert f"usage: tarsus {' '.join(args)}" in capsys.readouterr().out


def test_help_says_defaults_and_units(capsys):
    tarsus.main(["train", "--help"])
    printed = capsys.readouterr().out
    assert "Time between checkpoints [s]. (default: 60.0)" in printed


def test_version(capsys, monkeypatch):
    monkeypatch.setattr(metadata, "version", {"tarsus": "7.8.9"}.__getitem__)
    assert tarsus.main(["--version"]) == 0
    assert capsys.readouterr().out == "tarsus 7.8.9\n"


# what is wrong is said in one sentence


@pytest.mark.parametrize(
    ("args", "nearest"),
    [
        (["trian"], "train"),
        (["Doctor"], "doctor"),
        (["log", "inspct"], "inspect"),
        (["robots", "unitree_h12"], "unitree_h1_2"),
        (["train", "velocty"], "velocity"),
        (["train", "velocity", "--robot", "h1_2"], "unitree_h1_2"),
    ],
    ids=" ".join,
)
def test_an_unknown_name_lists_the_nearest(capsys, tmp_path, monkeypatch, args, nearest):
    monkeypatch.chdir(tmp_path)
    assert tarsus.main(args) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert f"did you mean {nearest}" in printed.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "args",
    [
        [""],
        ["\n"],
        ["a" * 100_000],
        ["\udcff\udcfe"],
        ["--"],
        ["--no-such-option"],
        ["robots", ""],
        ["robots", "../.."],
        ["robots", "unitree_h1_2", "unitree_h1_2"],
        ["tasks", "x"],
        ["doctor", "--json=maybe"],
        ["train", "--steps", "many"],
        ["train", "--algorithm", "dqn"],
        ["evaluate"],
        ["evaluate", "nowhere"],
        ["evaluate", "/dev/null"],
        ["play", "nowhere.onnx"],
        ["report", ""],
        ["export", "nowhere"],
        ["log", "inspect"],
        ["log", "inspect", "x.csv", "--robot"],
        ["log", "inspect", "x.csv", "--robot", "nobody"],
    ],
    ids=lambda args: " ".join(repr(a)[:24] for a in args),
)
def test_bad_arguments_are_refused_with_a_message(capsys, args):
    assert tarsus.main(args) == 2
    assert capsys.readouterr().err


def test_an_argument_that_is_no_text_is_refused_without_a_traceback():
    result = run(b"\xff\xfe")
    assert (result.returncode, "Traceback" in result.stderr, "unknown command" in result.stderr) == (2, False, True)


@pytest.mark.parametrize("path", ["no/such.mcap", "", b"\xff.mcap", "/proc/self/mem", "/dev/null"])
def test_a_log_that_cannot_be_read_is_named_and_the_others_are_still_read(table, path):
    result = run("log", "inspect", path, str(table))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "200" in result.stdout


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (UserError("what to do"), "tarsus: what to do\n"),
        (OSError(28, "No space left on device", "/run/x"), "tarsus: /run/x: No space left on device\n"),
        (
            ModuleNotFoundError("No module named 'nothing.here'", name="nothing.here"),
            "tarsus: this needs the Python package 'nothing'; `tarsus doctor` says how to get it\n",
        ),
    ],
    ids=["user", "system", "package"],
)
def test_errors_of_the_users_world_are_sentences_unless_debugged(capsys, raising, error, sentence):
    raising(error)
    assert tarsus.main(["fail"]) == 2
    assert capsys.readouterr().err == sentence
    with pytest.raises(type(error)):
        tarsus.main(["--debug", "fail"])


@pytest.mark.parametrize("error", [ValueError("x"), ModuleNotFoundError("x", name="sim.nowhere"), AssertionError()])
def test_faults_of_our_own_keep_their_traceback(raising, error):
    raising(error)
    with pytest.raises(type(error)):
        tarsus.main(["fail"])


def test_interrupt_has_the_shells_status(raising):
    raising(KeyboardInterrupt())
    assert tarsus.main(["fail"]) == 130


@pytest.mark.parametrize(
    "args", [["robots", "unitree_h1_2"], ["evaluate", "--help"], ["log", "inspect", "{table}", "--json"]]
)
def test_a_reader_that_leaves_is_no_error_worth_a_message(table, args):
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, *(a.format(table=table) for a in args)]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_output_that_cannot_be_written_is_an_error():
    with Path("/dev/full").open("w") as full:
        result = subprocess.run([*COMMAND, "robots"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, "tarsus: No space left on device\n")


# robots, tasks, log


def test_robots_lists_every_robot_and_its_joints_uncut_in_order(capsys):
    assert tarsus.main(["robots"]) == 0
    listed = capsys.readouterr().out
    assert [n for n in robots.names() if n not in listed] == []
    for name in robots.names():
        assert tarsus.main(["robots", name]) == 0
        words = capsys.readouterr().out.split()
        known = set(robots.load(name).joint_names)
        assert [w for w in words if w in known] == list(robots.load(name).joint_names)


def test_tasks_lists_every_task(capsys):
    assert tarsus.main(["tasks"]) == 0
    words = capsys.readouterr().out.split()
    assert [t for t in TASKS if t not in words] == []


def test_log_inspect_prints_json_for_programs(capsys, table):
    assert tarsus.main(["log", "inspect", str(table), "--json"]) == 0
    documents = json.loads(capsys.readouterr().out)
    assert [Path(d["path"]) for d in documents] == [table]


def test_log_inspect_draws(table, tmp_path):
    assert tarsus.main(["log", "inspect", str(table), "--plot", str(tmp_path / "log.png")]) == 0
    assert (tmp_path / "log.png").read_bytes().startswith(b"\x89PNG")


# doctor


@pytest.fixture(scope="module")
def items() -> list[tarsus_doctor.Item]:
    return list(tarsus_doctor.examine())


def test_doctor_makes_every_backend_step(items):
    assert {i.name for i in items if i.section == "backend" and i.state == "ok"} == set(BACKENDS)


def test_doctor_says_what_to_do_about_everything_that_is_not_well(items):
    assert [i for i in items if i.state != "ok" and not i.advice] == []


def test_doctor_tries_everything_that_needs_the_system(items):
    tried = {i.name: i.state for i in items if i.section in ("rendering", "kinematics")}
    assert {n: state == "ok" for n, state in tried.items()} == {
        n: said == "" for n, said in tarsus_doctor.probe().items()
    }


@pytest.mark.parametrize(
    ("results", "missing"),
    [
        ({"egl": "", "osmesa": "", "pinocchio": ""}, []),
        ({"egl": "", "osmesa": "no", "pinocchio": ""}, []),
        ({"egl": "no", "osmesa": "", "pinocchio": ""}, []),
        ({"egl": "no", "osmesa": "no", "pinocchio": ""}, ["egl"]),
        ({"egl": "no", "osmesa": "no", "pinocchio": "no"}, ["egl", "pinocchio"]),
        ({"pinocchio": "no"}, ["pinocchio"]),
        ({}, []),
    ],
)
def test_doctor_names_only_the_system_packages_that_are_needed(monkeypatch, results, missing):
    monkeypatch.setattr(tarsus_doctor, "probe", lambda: results)
    assert tarsus_doctor.system_packages() == [tarsus_doctor.PROBES[n].debian for n in missing]


def test_a_probe_that_dies_is_reported_with_its_last_words(monkeypatch):
    probes = {
        "says": tarsus_doctor.Probe(section="x", module="sys", source="import nothing_like_it", debian="a"),
        "dies": tarsus_doctor.Probe(section="y", module="sys", source="import os; os._exit(3)", debian="b"),
        "absent": tarsus_doctor.Probe(section="z", module="nothing_like_it", source="", debian="c"),
    }
    monkeypatch.setattr(tarsus_doctor, "PROBES", probes)
    assert tarsus_doctor.probe() == {
        "says": "ModuleNotFoundError: No module named 'nothing_like_it'",
        "dies": "exit status 3",
    }
    assert tarsus_doctor.system_packages() == ["a", "b"]


def test_doctor_prints_json_and_a_table_with_the_same_items(capsys, monkeypatch, items):
    monkeypatch.setattr(tarsus_doctor, "examine", lambda: iter(items))
    assert tarsus.main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["core_ok"] is True
    assert [i["name"] for i in document["items"]] == [i.name for i in items]
    assert tarsus.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert [i for i in items if i.name not in printed or i.found not in printed or i.advice not in printed] == []


def test_doctor_compares_versions(monkeypatch):
    wanted = [
        "rich<0.1",
        "numpy>=1",
        'nowhere>=3; extra == "train"',
        'tyro<0.1; python_version > "3" and extra == "view"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda _: wanted)
    monkeypatch.setattr(metadata, "version", lambda n: version(n) if n != "tarsus" else "1")
    found = {i.name: i for i in tarsus_doctor._packages()}
    assert {n: (i.section, i.state) for n, i in found.items()} == {
        "tarsus": ("core", "ok"),
        "rich": ("core", "differs"),
        "numpy": ("core", "ok"),
        "nowhere": ("extra train", "missing"),
        "tyro": ("extra view", "differs"),
    }


version = metadata.version


@pytest.mark.parametrize(
    "item",
    [
        tarsus_doctor.Item(section="core", name="numpy", state="broken", found="no"),
        tarsus_doctor.Item(section="core", name="numpy", state="missing", found="no"),
    ],
    ids=lambda i: i.state,
)
def test_doctor_fails_only_for_a_broken_core(capsys, monkeypatch, item):
    missing = tarsus_doctor.Item(section="extra train", name="torch", state="missing", found="no", advice="get it")
    monkeypatch.setattr(tarsus_doctor, "examine", lambda: iter([missing]))
    assert tarsus.main(["doctor"]) == 0
    monkeypatch.setattr(tarsus_doctor, "examine", lambda: iter([missing, item]))
    assert tarsus.main(["doctor"]) == 1
    assert "cannot run here" in capsys.readouterr().out


def test_doctor_finds_a_core_module_that_does_not_import(monkeypatch):
    monkeypatch.setattr(tarsus_doctor, "CORE_MODULES", ("numpy", "no_such_module"))
    assert [(i.name, i.state) for i in tarsus_doctor._core_modules()] == [("no_such_module", "broken")]
