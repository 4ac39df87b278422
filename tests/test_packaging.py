import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import robots

REPO = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "runs", "demo", "__pycache__", "tests", "docs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of the sources, so that building leaves nothing in them."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(REPO, folder / "source", ignore=LEFT_OUT)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(folder / "source")]
    subprocess.run(command, check=True)
    return zipfile.ZipFile(next(folder.glob("tarsus-*.whl")))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_every_module_is_in_the_wheel(wheel):
    rooms = [p.parent.name for p in REPO.glob("*/__init__.py")]
    sources = [p.relative_to(REPO).as_posix() for room in rooms for p in (REPO / room).rglob("*.py")]
    assert set(sources) | {"tarsus.py", "tarsus_doctor.py"} <= set(wheel.namelist())


def test_every_robots_model_file_is_in_the_wheel(wheel):
    for name in robots.names():
        path = robots.load(name).mjcf
        assert wheel.read(path.relative_to(REPO).as_posix()) == path.read_bytes()


def test_every_shipped_policy_is_in_the_wheel(wheel):
    shipped = {p.relative_to(REPO).as_posix() for p in (REPO / "policies").rglob("*.onnx")}
    assert shipped == {n for n in wheel.namelist() if n.endswith(".onnx")}


def test_nothing_but_rooms_and_the_command_is_on_the_import_path(wheel):
    tops = {n.split("/")[0] for n in wheel.namelist() if not re.match(r"tarsus-[\d.]+\.(dist-info|data)/", n)}
    assert tops == {p.parent.name for p in REPO.glob("*/__init__.py")} | {"tarsus.py", "tarsus_doctor.py"}


def test_the_command_is_installed_for_pip_and_found_by_ros(wheel):
    name = next(n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    assert "tarsus = tarsus:main" in wheel.read(name).decode().splitlines()
    config = (REPO / "setup.cfg").read_text()
    assert "script_dir=$base/lib/tarsus" in config
    assert "install_scripts=$base/lib/tarsus" in config


@pytest.mark.parametrize("path", ["share/ament_index/resource_index/packages/tarsus", "share/tarsus/package.xml"])
def test_ros_finds_the_package(wheel, path):
    assert any(n.endswith(f".data/data/{path}") for n in wheel.namelist())


@pytest.mark.parametrize("name", ["LICENSE", "NOTICE"])
def test_licences_travel_with_the_wheel(wheel, name):
    assert any(n.endswith(f"/{name}") and ".dist-info/" in n for n in wheel.namelist())


def test_name_version_and_licence_agree_everywhere(metadata):
    package = ET.parse(REPO / "package.xml").getroot()
    newest = re.search(r"^## (\S+)", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert metadata["Name"] == package.findtext("name") == "tarsus"
    assert metadata["Version"] == package.findtext("version") == newest[1]
    assert metadata["License"] == package.findtext("license") == "Apache-2.0"


def test_the_core_asks_for_neither_torch_nor_mujoco(metadata):
    core = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert any(r.startswith("numpy") for r in core)
    assert not [r for r in core if re.match(r"torch|mujoco|rsl|pin\b|matplotlib|onnx\b|ros-", r)]


def test_every_requirement_has_a_bound(metadata):
    assert not [r for r in metadata.get_all("Requires-Dist", []) if not re.search(r"[<>=]=?\s*\d", r.split(";")[0])]


def test_every_extra_a_user_is_told_of_exists(metadata):
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"ros", "dev", "test", "all", "sim", "train"} <= extras
    texts = [p.read_text() for p in (REPO / "README.md", REPO / "tarsus_doctor.py", *(REPO / "docs").glob("*.md"))]
    named = {e for t in texts for group in re.findall(r"pip install [^\n`]*\[([\w,]+)\]", t) for e in group.split(",")}
    assert named <= extras
