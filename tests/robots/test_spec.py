"""Order, groups, poses, mirror and hash of a robot spec, and the registry of robots."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import robots
from robots import JointSpec, RobotSpec, UnknownNameError, UserError

MJCF = "<mujoco><worldbody/></mujoco>"


def joint(name: str, motor: int, mirror: tuple[str, float], default: float = 0.0, group: str = "legs") -> JointSpec:
    return JointSpec(
        name=name,
        group=group,
        motor=motor,
        default_pos=default,
        stiffness=10.0 + motor,
        damping=1.0,
        pos_limit=(-1.0 - motor, 2.0 + motor),
        vel_limit=5.0,
        effort_limit=7.0,
        mirror=mirror,
    )


@pytest.fixture
def spec(tmp_path: Path) -> RobotSpec:
    mjcf = tmp_path / "toy.xml"
    mjcf.write_bytes(MJCF.encode())
    return RobotSpec(
        name="toy",
        mjcf=mjcf,
        joints=(
            joint("l_hip", 0, ("r_hip", -1.0), default=0.1),
            joint("l_knee", 1, ("r_knee", 1.0), default=0.2),
            joint("r_hip", 2, ("l_hip", -1.0), default=-0.1),
            joint("r_knee", 3, ("l_knee", 1.0), default=0.2),
            joint("waist", 4, ("waist", -1.0), group="waist"),
        ),
        base_body="base",
        imu_site="imu",
        imu_joints=("waist",),
        foot_bodies=("l_foot", "r_foot"),
        poses={"squat": {"l_knee": 1.0, "r_knee": 1.0}},
        spawn_height=1.0,
    )


def permuted(spec: RobotSpec) -> RobotSpec:
    return dataclasses.replace(spec, joints=spec.joints[::-1])


def test_index_maps_names_to_the_joint_order(spec):
    np.testing.assert_array_equal(spec.index(["waist", "l_hip"]), [4, 0])


def test_index_undoes_a_permutation(spec):
    shuffled = permuted(spec)
    values = np.arange(5.0)
    np.testing.assert_array_equal(values[spec.index(shuffled.joint_names)][shuffled.index(spec.joint_names)], values)


@pytest.mark.parametrize(
    "ask", [lambda s: s.index(["l_hipp"]), lambda s: s.joint("l_hipp"), lambda s: s.mirror(["l_hipp"])]
)
def test_unknown_joint_names_robot_and_nearest(spec, ask):
    with pytest.raises(UnknownNameError, match="unknown joint of toy 'l_hipp'; did you mean l_hip"):
        ask(spec)


def test_groups_come_in_joint_order_whatever_the_order_asked(spec):
    assert spec.group("waist", "legs") == spec.joint_names
    assert spec.group("waist") == ("waist",)
    with pytest.raises(UnknownNameError, match="unknown joint group of toy 'leg'; did you mean legs"):
        spec.group("leg")


def test_array_follows_the_names_asked_for(spec):
    np.testing.assert_array_equal(spec.array("stiffness"), [10, 11, 12, 13, 14])
    np.testing.assert_array_equal(spec.array("stiffness", ["waist", "l_knee"]), [14, 11])
    np.testing.assert_array_equal(spec.array("pos_limit", ["l_knee"]), [[-2, 3]])


def test_poses(spec):
    np.testing.assert_array_equal(spec.pose("default"), [0.1, 0.2, -0.1, 0.2, 0.0])
    np.testing.assert_array_equal(spec.pose("squat"), [0, 1, 0, 1, 0])
    np.testing.assert_array_equal(spec.pose("squat", ["r_knee", "waist"]), [1, 0])
    with pytest.raises(UnknownNameError, match="unknown pose of toy 'squad'; did you mean squat"):
        spec.pose("squad")


def test_mirror_swaps_sides_and_twice_is_nothing(spec):
    order, signs = spec.mirror()
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    np.testing.assert_array_equal(signs * values[order], [-3, 4, -1, 2, -5])
    np.testing.assert_array_equal(signs * (signs * values[order])[order], values)


def test_mirror_of_a_subset_indexes_into_the_subset(spec):
    order, signs = spec.mirror(["waist", "r_knee", "l_knee"])
    np.testing.assert_array_equal(order, [0, 2, 1])
    np.testing.assert_array_equal(signs, [-1, 1, 1])


def test_mirror_of_one_side_only_says_which_joint_is_missing(spec):
    with pytest.raises(UserError, match="joint 'l_knee' has no mirror image here: 'r_knee' is not among"):
        spec.mirror(["l_hip", "r_hip", "l_knee"])


def test_hash_is_stable_over_objects(spec):
    assert dataclasses.replace(spec).model_hash == spec.model_hash
    assert len(spec.model_hash) == 64


def test_hash_sees_a_permuted_joint_table(spec):
    assert permuted(spec).model_hash != spec.model_hash


@pytest.mark.parametrize(
    ("field", "value"),
    [("stiffness", 10.000001), ("damping", 2.0), ("effort_limit", 8.0), ("pos_limit", (-1.0, 2.1)), ("motor", 9)],
)
def test_hash_sees_every_number_of_a_joint(spec, field, value):
    changed = dataclasses.replace(spec.joints[0], **{field: value})
    assert dataclasses.replace(spec, joints=(changed, *spec.joints[1:])).model_hash != spec.model_hash


def test_hash_is_blind_to_line_endings_but_not_to_comments(spec, tmp_path):
    """A checkout with CRLF is the same robot; the file's text is what is hashed, so a comment counts as a change."""
    texts = {
        "lf": "<mujoco>\n</mujoco>\n",
        "crlf": "<mujoco>\r\n</mujoco>\r\n",
        "comment": "<mujoco>\n<!---->\n</mujoco>\n",
    }
    hashes = {}
    for name, text in texts.items():
        path = tmp_path / f"{name}.xml"
        path.write_bytes(text.encode())
        hashes[name] = dataclasses.replace(spec, mjcf=path).model_hash
    assert hashes["lf"] == hashes["crlf"]
    assert hashes["lf"] != hashes["comment"]


def test_registry_lists_and_loads_robots():
    assert "unitree_h1_2" in robots.names()
    for name in robots.names():
        assert robots.load(name).name == name
        assert robots.load(name).mjcf.is_file()


def test_registry_names_the_nearest_robot():
    with pytest.raises(UnknownNameError, match="unknown robot 'h1_2'; did you mean unitree_h1_2"):
        robots.load("h1_2")


def test_specs_and_signals_need_neither_mujoco_nor_torch():
    code = (
        "import sys; sys.modules.update(mujoco=None, torch=None, pinocchio=None);"
        "import robots, robots.signals;"
        "print(len(robots.signals.robot_signals(robots.load('unitree_h1_2'))))"
    )
    root = Path(robots.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() == "7"
