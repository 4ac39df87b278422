"""The H1-2 against numbers published by others, typed in here and not read from the model.

Kinematics, inertials and limits: unitree_ros h1_2_handless.urdf. Principal moments: unitree_mujoco h1_2_handless.xml.
Heights, centres of mass, body positions and merged forearms: measured on a separate model made from the same URDF.
A tolerance is half a unit of the last printed digit unless it says otherwise.
"""

import itertools
import re
from pathlib import Path

import mujoco
import numpy as np
import pytest

import robots
from robots.model import ModelConfig, build_model, joint_addresses

SPEC = robots.load("unitree_h1_2")

# joint, parent, position and roll in the parent [m, rad], axis, lower, upper [rad], effort [N m], speed [rad/s]
JOINTS = (
    ("left_hip_yaw_joint", "pelvis", (0, 0.0875, -0.1632), 0, "z", -0.43, 0.43, 200, 23),
    ("left_hip_pitch_joint", "left_hip_yaw_link", (0, 0.0755, 0), 0, "y", -3.14, 2.5, 200, 23),
    ("left_hip_roll_joint", "left_hip_pitch_link", (0, 0, 0), 0, "x", -0.43, 3.14, 200, 23),
    ("left_knee_joint", "left_hip_roll_link", (0, 0, -0.4), 0, "y", -0.12, 2.19, 300, 14),
    ("left_ankle_pitch_joint", "left_knee_link", (0, 0, -0.4), 0, "y", -0.897334, 0.523598, 60, 9),
    ("left_ankle_roll_joint", "left_ankle_pitch_link", (0, 0, -0.02), 0, "x", -0.261799, 0.261799, 40, 9),
    ("right_hip_yaw_joint", "pelvis", (0, -0.0875, -0.1632), 0, "z", -0.43, 0.43, 200, 23),
    ("right_hip_pitch_joint", "right_hip_yaw_link", (0, -0.0755, 0), 0, "y", -3.14, 2.5, 200, 23),
    ("right_hip_roll_joint", "right_hip_pitch_link", (0, 0, 0), 0, "x", -3.14, 0.43, 200, 23),
    ("right_knee_joint", "right_hip_roll_link", (0, 0, -0.4), 0, "y", -0.12, 2.19, 300, 14),
    ("right_ankle_pitch_joint", "right_knee_link", (0, 0, -0.4), 0, "y", -0.897334, 0.523598, 60, 9),
    ("right_ankle_roll_joint", "right_ankle_pitch_link", (0, 0, -0.02), 0, "x", -0.261799, 0.261799, 40, 9),
    ("torso_joint", "pelvis", (0, 0, 0), 0, "z", -2.35, 2.35, 200, 23),
    ("left_shoulder_pitch_joint", "torso_link", (0, 0.14806, 0.42333), 0.2618, "y", -3.14, 1.57, 40, 9),
    (
        "left_shoulder_roll_joint",
        "left_shoulder_pitch_link",
        (0.0342, 0.061999, -0.0060011),
        -0.2618,
        "x",
        -0.38,
        3.4,
        40,
        9,
    ),
    ("left_shoulder_yaw_joint", "left_shoulder_roll_link", (-0.0342, 0, -0.1456), 0, "z", -2.66, 3.01, 18, 20),
    ("left_elbow_joint", "left_shoulder_yaw_link", (0.006, 0.0329, -0.182), 0, "y", -0.95, 3.18, 18, 20),
    ("left_wrist_roll_joint", "left_elbow_link", (0.121, -0.0329, -0.011), 0, "x", -3.01, 2.75, 19, 31.4),
    ("left_wrist_pitch_joint", "left_wrist_roll_link", (0.087, 0, 0), 0, "y", -0.4625, 0.4625, 19, 31.4),
    ("left_wrist_yaw_joint", "left_wrist_pitch_link", (0.02, 0, 0), 0, "z", -1.27, 1.27, 19, 31.4),
    ("right_shoulder_pitch_joint", "torso_link", (0, -0.14806, 0.42333), -0.2618, "y", -3.14, 1.57, 40, 9),
    (
        "right_shoulder_roll_joint",
        "right_shoulder_pitch_link",
        (0.0342, -0.061999, -0.0060011),
        0.2618,
        "x",
        -3.4,
        0.38,
        40,
        9,
    ),
    ("right_shoulder_yaw_joint", "right_shoulder_roll_link", (-0.0342, 0, -0.1456), 0, "z", -3.01, 2.66, 18, 20),
    ("right_elbow_joint", "right_shoulder_yaw_link", (0.006, -0.0329, -0.182), 0, "y", -0.95, 3.18, 18, 20),
    ("right_wrist_roll_joint", "right_elbow_link", (0.121, 0.0329, -0.011), 0, "x", -2.75, 3.01, 19, 31.4),
    ("right_wrist_pitch_joint", "right_wrist_roll_link", (0.087, 0, 0), 0, "y", -0.4625, 0.4625, 19, 31.4),
    ("right_wrist_yaw_joint", "right_wrist_pitch_link", (0.02, 0, 0), 0, "z", -1.27, 1.27, 19, 31.4),
)
MASS_AND_COM = {  # [kg], in the link frame [m]
    "pelvis": (5.983, (-0.0004, 3.7e-05, -0.046864)),
    "left_hip_yaw_link": (2.829, (0, -0.026197, 0.006647)),
    "left_hip_pitch_link": (2.92, (-0.00781, -0.004724, -6.3e-05)),
    "left_hip_roll_link": (4.962, (0.004171, -0.008576, -0.194509)),
    "left_knee_link": (3.839, (0.000179, 0.000121, -0.168936)),
    "left_ankle_pitch_link": (0.102, (-0.000294, 0, -0.010794)),
    "left_ankle_roll_link": (0.747, (0.029589, 0, -0.015973)),
    "right_hip_yaw_link": (2.829, (0, 0.026197, 0.006647)),
    "right_hip_pitch_link": (2.92, (-0.00781, 0.004724, -6.3e-05)),
    "right_hip_roll_link": (4.962, (0.004171, 0.008576, -0.194509)),
    "right_knee_link": (3.839, (0.000179, -0.000121, -0.168936)),
    "right_ankle_pitch_link": (0.102, (-0.000294, 0, -0.010794)),
    "right_ankle_roll_link": (0.747, (0.029589, 0, -0.015973)),
    "torso_link": (17.789, (0.000489, 0.002797, 0.20484)),
    "left_shoulder_pitch_link": (1.327, (0.003053, 0.06042, -0.0059)),
    "left_shoulder_roll_link": (1.393, (-0.030932, -1e-06, -0.10609)),
    "left_shoulder_yaw_link": (1.505, (0.004583, 0.001128, -0.001128)),
    "left_elbow_link": (0.691, (0.077092, -0.028751, -0.009714)),
    "left_wrist_roll_link": (0.683, (0.035281, -0.00232, 0.000337)),
    "left_wrist_pitch_link": (0.484, (0.020395, 3.6e-05, -0.002973)),
    "left_wrist_yaw_link": (0.124, (0.027967, 9.6e-05, 0.000739)),
    "right_shoulder_pitch_link": (1.327, (0.003053, -0.06042, -0.0059)),
    "right_shoulder_roll_link": (1.393, (-0.030932, 1e-06, -0.10609)),
    "right_shoulder_yaw_link": (1.505, (0.004583, -0.001128, -0.001128)),
    "right_elbow_link": (0.691, (0.077092, 0.028751, -0.009714)),
    "right_wrist_roll_link": (0.683, (0.035281, -0.00232, 0.000337)),
    "right_wrist_pitch_link": (0.484, (0.020395, 3.6e-05, -0.002973)),
    "right_wrist_yaw_link": (0.124, (0.027967, -9.6e-05, 0.000739)),
}
INERTIA = {  # ixx ixy ixz iyy iyz izz about the centre of mass in link axes [kg m^2]
    "pelvis": (0.0491684, -1.9869e-05, -4.846e-05, 0.00902584, 3.431e-06, 0.0531559),
    "left_hip_yaw_link": (0.0045536, 5e-09, 8.17e-07, 0.00568873, -0.000345157, 0.00354891),
    "left_hip_pitch_link": (0.0055947, 0.000143308, -1.1847e-05, 0.00386258, -9.607e-06, 0.00445056),
    "left_hip_roll_link": (0.0463059, -0.000322626, -0.0011997, 0.0479554, 0.000288147, 0.00891452),
    "left_knee_link": (0.0390024, -7.2364e-05, -0.000794506, 0.0390424, -1.8663e-05, 0.00502983),
    "left_ankle_pitch_link": (2.3944e-05, 0, 1.21e-07, 2.1837e-05, 0, 1.3414e-05),
    "left_ankle_roll_link": (0.00064883, 0, 0.00015838, 0.00343534, 0, 0.00358326),
    "right_hip_yaw_link": (0.0045536, -5e-09, 8.17e-07, 0.00568873, 0.000345157, 0.00354891),
    "right_hip_pitch_link": (0.0055947, -0.000143308, -1.1847e-05, 0.00386258, 9.607e-06, 0.00445056),
    "right_hip_roll_link": (0.0463059, 0.000322626, -0.0011997, 0.0479554, -0.000288147, 0.00891452),
    "right_knee_link": (0.0390024, 7.2364e-05, -0.000794506, 0.0390424, 1.8663e-05, 0.00502983),
    "right_ankle_pitch_link": (2.3944e-05, 0, 1.21e-07, 2.1837e-05, 0, 1.3414e-05),
    "right_ankle_roll_link": (0.00064883, 0, 0.00015838, 0.00343534, 0, 0.00358326),
    "torso_link": (0.4873, -0.00053763, 0.0020276, 0.40963, -0.00074582, 0.12785),
    "left_shoulder_pitch_link": (0.00058661, -2.0157e-05, 2.985e-06, 0.0003989, 2.238e-05, 0.00052936),
    "left_shoulder_roll_link": (0.0018408, 3.98e-07, -0.00048324, 0.00193464, 1.61e-07, 0.000617733),
    "left_shoulder_yaw_link": (0.004199, -1.7786e-05, 0.00018372, 0.0043139, 9.278e-05, 0.00065755),
    "left_elbow_link": (0.000318491, 0.000224554, 6.62076e-05, 0.000861224, -2.3329e-05, 0.000897899),
    "left_wrist_roll_link": (0.000313275, 1.6521e-05, -2.501e-06, 0.000310412, 5.435e-06, 0.000345998),
    "left_wrist_pitch_link": (7.1364e-05, 3.08e-07, 1.485e-06, 6.9915e-05, -8.8e-08, 7.0702e-05),
    "left_wrist_yaw_link": (0.0001373, -1.71e-07, 2.942e-06, 0.000169998, -2.5e-08, 8.4808e-05),
    "right_shoulder_pitch_link": (0.00058661, 2.0157e-05, 2.985e-06, 0.0003989, -2.238e-05, 0.00052936),
    "right_shoulder_roll_link": (0.0018408, -3.98e-07, -0.00048324, 0.00193464, -1.61e-07, 0.000617733),
    "right_shoulder_yaw_link": (0.004199, 1.7786e-05, 0.00018372, 0.0043139, -9.278e-05, 0.00065755),
    "right_elbow_link": (0.000318491, -0.000224554, 6.62076e-05, 0.000861224, 2.3329e-05, 0.000897899),
    "right_wrist_roll_link": (0.000313275, 1.6521e-05, -2.501e-06, 0.000310412, 5.435e-06, 0.000345998),
    "right_wrist_pitch_link": (7.1364e-05, 3.08e-07, 1.485e-06, 6.9915e-05, -8.8e-08, 7.0702e-05),
    "right_wrist_yaw_link": (0.0001373, 1.71e-07, 2.942e-06, 0.000169998, 2.5e-08, 8.4808e-05),
}
PRINCIPAL_MOMENTS = {  # six significant digits [kg m^2]
    "pelvis": (0.0531565, 0.0491678, 0.00902583),
    "left_hip_yaw_link": (0.00574303, 0.00455361, 0.00349461),
    "left_hip_pitch_link": (0.00560661, 0.00445055, 0.00385068),
    "left_hip_roll_link": (0.0480229, 0.0462788, 0.00887409),
    "left_knee_link": (0.0391044, 0.038959, 0.00501125),
    "left_ankle_pitch_link": (2.39454e-05, 2.1837e-05, 1.34126e-05),
    "left_ankle_roll_link": (0.00359178, 0.00343534, 0.000640307),
    "torso_link": (0.487315, 0.409628, 0.127837),
}
MERGED_FOREARM = {  # elbow link with locked wrists, in the elbow frame: kg, m, ixx ixy ixz iyy iyz izz [kg m^2]
    "left": (1.98200, (0.152519, -0.032238, -0.011115), (0.000861, 0.000461, 0.000234, 0.009471, -0.000021, 0.009468)),
    "right": (1.98200, (0.152519, 0.030657, -0.011115), (0.000852, -0.000418, 0.000234, 0.009471, 0.000033, 0.009459)),
}
SOLE_HEIGHT = {"zero": 1.0282, "stand": 1.0151, "crouch": 0.9650}  # pelvis above the ground, soles flat [m]
COM = {"zero": (0.0106, 0.0007, -0.0901), "crouch": (0.0172, 0.0007, -0.0839)}  # in the pelvis frame [m]
POSITIONS = {  # in the pelvis frame [m]
    "zero": {
        "left_knee_link": (0, 0.163, -0.5632),
        "left_ankle_roll_link": (0, 0.163, -0.9832),
        "left_elbow_link": (0.006, 0.2424, 0.106),
        "left_wrist_yaw_link": (0.234, 0.2095, 0.095),
    },
    "crouch": {
        "left_knee_link": (0.1558, 0.163, -0.5316),
        "left_ankle_roll_link": (0, 0.163, -0.9200),
        "left_elbow_link": (-0.1249, 0.3006, 0.1423),
        "left_wrist_yaw_link": (0.0432, 0.3039, -0.0155),
    },
}
# motor: armature = rotor inertia times ratio squared [kg m^2], joints by motor index
ARMATURE = {
    "M107-24": (0.160478022, (1, 2, 3, 7, 8, 9)),
    "M107-15": (0.063259741, (0, 6, 12)),
    "N7520-22.5": (0.025101925, (13, 14, 16, 20, 21, 23)),
    "N7520-14.3": (0.01017752, (4, 5, 10, 11, 15, 22)),
    "N5020-16": (0.003609725, (17, 18, 19, 24, 25, 26)),
}
PUBLISHED_FRICTION = {2.4: (13, 14, 16, 20, 21, 23), 1.6: (4, 5, 10, 11, 15, 22)}  # [N m], the N7520 motors
GAINS = {  # unitree_rl_gym where not said otherwise: kp [N m/rad], kd [N m s/rad]
    "hip_yaw": (200, 2.5),
    "hip_pitch": (200, 2.5),
    "hip_roll": (200, 2.5),
    "knee": (300, 4),
    "ankle": (80, 2),  # its SDK example for 27 joints
    "torso": (300, 3),
    "shoulder": (120, 2),
    "elbow": (80, 1),
    "wrist": (80, 1),
}
SOLE_SPHERES = {(x, y, -0.040) for x in (-0.079, 0.167) for y in (-0.036, 0.036)}  # in the ankle roll frame [m]
MESH_BOUNDS = {  # lower and upper corner [m]
    "pelvis": ((-0.069, -0.153, -0.085), (0.069, 0.153, 0.008)),
    "torso_link": ((-0.073, -0.159, -0.002), (0.125, 0.159, 0.760)),
    "left_ankle_roll_link": ((-0.0860, -0.0430, -0.0450), (0.1740, 0.0430, 0.0296)),
    "right_ankle_roll_link": ((-0.0860, -0.0430, -0.0450), (0.1740, 0.0430, 0.0296)),
}


def no_ground(model: mujoco.MjSpec) -> None:
    """A world without ground."""


@pytest.fixture(scope="module")
def model() -> mujoco.MjModel:
    return build_model(SPEC)


def posed(model: mujoco.MjModel, joint_pos: np.ndarray, height: float = 3.0) -> mujoco.MjData:
    """Kinematics and contacts of the full model at rest with `joint_pos` (27) [rad] and the pelvis at `height` [m]."""
    data = mujoco.MjData(model)
    data.qpos[joint_addresses(model, SPEC.joint_names)[0]] = joint_pos
    data.qpos[2] = height
    mujoco.mj_forward(model, data)
    return data


def inertia_tensor(model: mujoco.MjModel, body: int) -> np.ndarray:
    """Inertia about the centre of mass in body axes, (3, 3) [kg m^2]."""
    axes = np.zeros(9)
    mujoco.mju_quat2Mat(axes, model.body_iquat[body])
    axes = axes.reshape(3, 3)
    return axes @ np.diag(model.body_inertia[body]) @ axes.T


def tensor(ixx: float, ixy: float, ixz: float, iyy: float, iyz: float, izz: float) -> np.ndarray:
    return np.array([[ixx, ixy, ixz], [ixy, iyy, iyz], [ixz, iyz, izz]])


def contacts(model: mujoco.MjModel, data: mujoco.MjData) -> set[tuple[str, str]]:
    return {(model.geom(c.geom1).name, model.geom(c.geom2).name) for c in data.contact}


# ---------------------------------------------------------------------------------------------- spec


def test_motor_order_is_the_bus_order():
    assert SPEC.joint_names == tuple(row[0] for row in JOINTS)
    assert [j.motor for j in SPEC.joints] == list(range(27))


@pytest.mark.parametrize("row", JOINTS, ids=lambda row: row[0])
def test_limits_of_the_spec(row):
    name, *_, lower, upper, effort, speed = row
    joint = SPEC.joint(name)
    assert (joint.pos_limit, joint.effort_limit, joint.vel_limit) == ((lower, upper), effort, speed)


@pytest.mark.parametrize("joint", SPEC.joints, ids=lambda j: j.name)
def test_gains(joint):
    kp, kd = next(gains for part, gains in GAINS.items() if part in joint.name)
    assert (joint.stiffness, joint.damping) == (kp, kd)


def test_groups():
    assert SPEC.group("legs") == SPEC.joint_names[:12]
    assert SPEC.group("waist") == ("torso_joint",)
    assert SPEC.group("wrists") == tuple(n for n in SPEC.joint_names if "wrist" in n)
    assert len(SPEC.group("arms")) == 8
    assert SPEC.group("legs", "waist", "arms", "wrists") == SPEC.joint_names


def test_poses_name_joints_and_stay_within_limits():
    lower, upper = SPEC.array("pos_limit").T
    for pose in ("default", *SPEC.poses):
        angles = SPEC.pose(pose)
        assert np.all((lower <= angles) & (angles <= upper)), pose
    for pose, angles in SPEC.poses.items():
        assert set(angles) <= set(SPEC.joint_names), pose


def test_mirror_symmetry_of_the_spec():
    order, signs = SPEC.mirror()
    np.testing.assert_array_equal(order[order], np.arange(27))
    np.testing.assert_array_equal(signs * signs[order], np.ones(27))
    for quantity in ("stiffness", "damping", "vel_limit", "effort_limit"):
        np.testing.assert_array_equal(SPEC.array(quantity)[order], SPEC.array(quantity))
    for pose in ("default", *SPEC.poses):
        np.testing.assert_array_equal(signs * SPEC.pose(pose)[order], SPEC.pose(pose))
    limits = np.sort(signs[:, None] * SPEC.array("pos_limit")[order], axis=1)
    np.testing.assert_array_equal(limits, SPEC.array("pos_limit"))


# ---------------------------------------------------------------------------------------- kinematics


@pytest.mark.parametrize("row", JOINTS, ids=lambda row: row[0])
def test_joint_of_the_model(model, row):
    name, parent, xyz, roll, axis, lower, upper, *_ = row
    joint = model.joint(name)
    body = model.body(name.replace("_joint", "_link"))
    assert joint.bodyid[0] == body.id
    assert model.body(body.parentid[0]).name == parent
    np.testing.assert_array_equal(body.pos, xyz)
    np.testing.assert_allclose(body.quat, (np.cos(roll / 2), np.sin(roll / 2), 0, 0), atol=1e-15)
    np.testing.assert_array_equal(joint.axis, np.eye(3)["xyz".index(axis)])
    np.testing.assert_array_equal(joint.pos, np.zeros(3))
    np.testing.assert_array_equal(joint.range, (lower, upper))
    assert joint.limited[0]


def test_model_has_no_other_joints(model):
    free = [model.joint(j).name for j in range(model.njnt) if model.jnt_type[j] == mujoco.mjtJoint.mjJNT_FREE]
    assert free == ["floating_base"]
    assert {model.joint(j).name for j in range(model.njnt)} == {*SPEC.joint_names, *free}
    assert (model.nq, model.nv, model.nu) == (34, 33, 27)


def test_spec_limits_equal_the_ranges_of_the_model(model):
    ranges = np.array([model.joint(n).range for n in SPEC.joint_names])
    np.testing.assert_array_equal(SPEC.array("pos_limit"), ranges)


@pytest.mark.parametrize("motor", ARMATURE)
def test_armature_of_the_motor(model, motor):
    armature, indices = ARMATURE[motor]
    for index in indices:
        assert model.joint(SPEC.joint_names[index]).armature[0] == armature


def test_every_joint_has_a_motor_and_the_base_has_no_armature(model):
    assert sorted(itertools.chain.from_iterable(i for _, i in ARMATURE.values())) == list(range(27))
    np.testing.assert_array_equal(model.dof_armature[:6], np.zeros(6))
    np.testing.assert_array_equal(model.dof_frictionloss[:6], np.zeros(6))
    np.testing.assert_array_equal(model.dof_damping, np.zeros(33))


def test_published_joint_friction(model):
    for friction, indices in PUBLISHED_FRICTION.items():
        for index in indices:
            assert model.joint(SPEC.joint_names[index]).frictionloss[0] == friction


def test_imu_sits_on_the_torso_without_rotation(model):
    imu = model.site(SPEC.imu_site)
    assert model.body(imu.bodyid[0]).name == "torso_link"
    np.testing.assert_array_equal(imu.quat, (1, 0, 0, 0))
    np.testing.assert_array_equal(imu.pos, (-0.04452, -0.01891, 0.27756))
    assert SPEC.imu_joints == ("torso_joint",)


def test_head_sensors(model):
    np.testing.assert_array_equal(model.site("head_camera").pos, (0.11109, 0.0175, 0.68789))
    np.testing.assert_array_equal(model.site("lidar").pos, (0.04874, 0, 0.6798))
    data = posed(model, SPEC.pose("zero"))
    for site, pitch in (("head_camera", 0.885929128), ("lidar", 0.240157305)):
        forward = data.site(site).xmat.reshape(3, 3)[:, 0]
        np.testing.assert_allclose(forward, (np.cos(pitch), 0, -np.sin(pitch)), atol=1e-12)
    view = -data.cam("head").xmat.reshape(3, 3)[:, 2]
    np.testing.assert_allclose(view, data.site("head_camera").xmat.reshape(3, 3)[:, 0], atol=1e-8)


@pytest.mark.parametrize("pose", SOLE_HEIGHT)
def test_pelvis_height_with_flat_soles(model, pose):
    data = posed(model, SPEC.pose(pose))
    soles = [g for g in range(model.ngeom) if model.geom_group[g] == 3]
    lowest = data.geom_xpos[soles, 2] - model.geom_size[soles, 0]
    np.testing.assert_allclose(lowest, lowest[0], atol=1e-12)
    assert data.qpos[2] - lowest[0] == pytest.approx(SOLE_HEIGHT[pose], abs=5e-5)


def test_spawn_height_is_the_default_pose_on_its_soles(model):
    data = posed(model, SPEC.pose("default"))
    assert 3.0 - data.site("left_sole").xpos[2] == pytest.approx(SPEC.spawn_height, abs=5e-5)


@pytest.mark.parametrize(("pose", "body"), [(p, b) for p, bodies in POSITIONS.items() for b in bodies])
def test_body_position_in_the_pelvis_frame(model, pose, body):
    data = posed(model, SPEC.pose(pose))
    np.testing.assert_allclose(data.body(body).xpos - data.body("pelvis").xpos, POSITIONS[pose][body], atol=5.1e-5)


@pytest.mark.parametrize("pose", COM)
def test_centre_of_mass_in_the_pelvis_frame(model, pose):
    data = posed(model, SPEC.pose(pose))
    np.testing.assert_allclose(data.subtree_com[0] - data.body("pelvis").xpos, COM[pose], atol=5e-5)


# ----------------------------------------------------------------------------------------- inertials


def test_total_mass(model):
    assert model.body_subtreemass[0] == pytest.approx(66.984, abs=1e-9)


@pytest.mark.parametrize("body", MASS_AND_COM)
def test_mass_and_centre_of_mass(model, body):
    mass, com = MASS_AND_COM[body]
    assert model.body(body).mass[0] == mass
    np.testing.assert_allclose(model.body(body).ipos, com, atol=1e-15)


@pytest.mark.parametrize("body", INERTIA)
def test_inertia(model, body):
    """To 1e-9 kg m^2, the last digit published; the model file holds principal axes, found by an iteration."""
    expected = tensor(*INERTIA[body])
    np.testing.assert_allclose(inertia_tensor(model, model.body(body).id), expected, rtol=0, atol=1e-9)


def test_no_other_link_has_mass(model):
    assert {model.body(b).name for b in range(model.nbody) if model.body_mass[b] > 0} == set(MASS_AND_COM)
    assert set(INERTIA) == set(MASS_AND_COM)


@pytest.mark.parametrize("body", PRINCIPAL_MOMENTS)
def test_principal_moments(model, body):
    moments = np.sort(model.body(body).inertia)[::-1]
    np.testing.assert_allclose(moments, PRINCIPAL_MOMENTS[body], rtol=5.1e-6)


@pytest.mark.parametrize("side", MERGED_FOREARM)
def test_locked_wrists_merge_into_the_forearm(side):
    model = build_model(SPEC, ModelConfig(lock=SPEC.group("wrists"), fuse=True))
    mass, com, inertia = MERGED_FOREARM[side]
    forearm = model.body(f"{side}_elbow_link")
    assert forearm.mass[0] == pytest.approx(mass, abs=5e-6)
    np.testing.assert_allclose(forearm.ipos, com, atol=5.1e-7)
    np.testing.assert_allclose(inertia_tensor(model, forearm.id), tensor(*inertia), rtol=0, atol=5.1e-7)


# -------------------------------------------------------------------------------------------- mirror


def mirrored_state(model: mujoco.MjModel, data: mujoco.MjData) -> tuple[np.ndarray, np.ndarray]:
    """State of `data` seen in the plane y = 0: qpos (34), qvel (33)."""
    order, signs = SPEC.mirror()
    q, v = joint_addresses(model, SPEC.joint_names)
    qpos, qvel = data.qpos.copy(), data.qvel.copy()
    qpos[:7] *= (1, -1, 1, 1, -1, 1, -1)  # position is a vector, rotation an axial one
    qvel[:6] *= (1, -1, 1, -1, 1, -1)
    qpos[q] = signs * data.qpos[q][order]
    qvel[v] = signs * data.qvel[v][order]
    return qpos, qvel


def mirrored_dofs(model: mujoco.MjModel) -> np.ndarray:
    """S (33, 33) with mirrored qvel = S qvel; generalized forces mirror by it too."""
    order, signs = SPEC.mirror()
    _, v = joint_addresses(model, SPEC.joint_names)
    matrix = np.diag((1.0, -1, 1, -1, 1, -1, *np.zeros(27)))
    matrix[v, v[order]] = signs
    return matrix


def symmetrised(spec: mujoco.MjSpec) -> mujoco.MjSpec:
    """Every link's inertial averaged with the mirror image of its partner's."""
    sign = np.diag((1.0, -1.0, 1.0))
    links = {b.name: (b.ipos.copy(), tensor(*b.fullinertia[[0, 3, 4, 1, 5, 2]])) for b in spec.bodies if b.mass > 0}
    for name, (com, inertia) in links.items():
        other = name.replace("left", "+").replace("right", "left").replace("+", "right")
        com, inertia = (com + sign @ links[other][0]) / 2, (inertia + sign @ links[other][1] @ sign) / 2
        body = spec.body(name)
        body.ipos = com
        body.fullinertia = inertia[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]]
    return spec


def random_state(model: mujoco.MjModel, rng: np.random.Generator) -> mujoco.MjData:
    data = mujoco.MjData(model)
    data.qpos[:3] = rng.normal(size=3)
    data.qpos[3:7] = rng.normal(size=4)
    data.qpos[3:7] /= np.linalg.norm(data.qpos[3:7])
    data.qpos[joint_addresses(model, SPEC.joint_names)[0]] = rng.uniform(*SPEC.array("pos_limit").T)
    data.qvel[:] = rng.normal(size=model.nv)
    mujoco.mj_forward(model, data)
    return data


def mirror_error(model: mujoco.MjModel) -> tuple[float, float, float]:
    """Worst violation over 20 states: foot positions [m], and relative: mass matrix, bias forces."""
    dofs = mirrored_dofs(model)
    worst = np.zeros(3)
    rng = np.random.default_rng(5)
    for _ in range(20):
        one, two = random_state(model, rng), mujoco.MjData(model)
        two.qpos[:], two.qvel[:] = mirrored_state(model, one)
        mujoco.mj_forward(model, two)
        feet = two.body("left_ankle_roll_link").xpos - one.body("right_ankle_roll_link").xpos * (1, -1, 1)
        mass_one, mass_two = np.zeros((model.nv, model.nv)), np.zeros((model.nv, model.nv))
        mujoco.mj_fullM(model, one, mass_one)
        mujoco.mj_fullM(model, two, mass_two)
        mass = np.abs(mass_two - dofs @ mass_one @ dofs.T).max() / np.abs(mass_one).max()
        bias = np.abs(two.qfrc_bias - dofs @ one.qfrc_bias).max() / np.abs(one.qfrc_bias).max()
        worst = np.maximum(worst, (np.abs(feet).max(), mass, bias))
    return tuple(worst)


def test_mirrored_state_has_mirrored_dynamics_but_for_the_robot_s_own_asymmetry(model):
    """Links are placed symmetrically; the centres of mass of torso and wrists lie 2 to 3 mm beside their place."""
    feet, mass, bias = mirror_error(model)
    assert feet < 1e-12
    assert 1e-6 < mass < 0.01
    assert 1e-6 < bias < 0.01


def test_mirrored_state_has_mirrored_dynamics_exactly_once_the_inertials_are_symmetric():
    symmetric = symmetrised(mujoco.MjSpec.from_file(str(SPEC.mjcf))).compile()
    assert max(mirror_error(symmetric)) < 1e-10


# -------------------------------------------------------------------------------------------- shapes


def test_sole_spheres(model):
    for side in ("left", "right"):
        foot = model.body(f"{side}_ankle_roll_link").id
        soles = [g for g in range(model.ngeom) if model.geom_bodyid[g] == foot and model.geom_group[g] == 3]
        assert {tuple(model.geom_pos[g]) for g in soles} == SOLE_SPHERES
        np.testing.assert_array_equal(model.geom_size[soles, 0], np.full(4, 0.005))


def test_shapes_are_primitives_with_names(model):
    assert model.nmesh == 0
    assert all(model.geom(g).name for g in range(model.ngeom))


@pytest.mark.parametrize("body", MESH_BOUNDS)
def test_shapes_stay_within_the_bounds_of_the_published_meshes(model, body):
    lower, upper = MESH_BOUNDS[body]
    data = posed(model, SPEC.pose("zero"))
    frame = data.body(body)
    for geom in np.flatnonzero(model.geom_bodyid == frame.id):
        corners = model.geom_aabb[geom, :3] + model.geom_aabb[geom, 3:] * np.array(
            list(itertools.product((-1, 1), repeat=3))
        )
        world = data.geom_xpos[geom] + corners @ data.geom_xmat[geom].reshape(3, 3).T
        local = (world - frame.xpos) @ frame.xmat.reshape(3, 3)
        assert np.all(local >= np.array(lower) - 1e-3), model.geom(geom).name
        assert np.all(local <= np.array(upper) + 1e-3), model.geom(geom).name


def test_shapes_are_symmetric(model):
    data = posed(model, SPEC.pose("zero"))
    for geom in range(model.ngeom):
        name = model.geom(geom).name
        if name.startswith("left_") and "heel" not in name and "toe" not in name:
            other = model.geom(name.replace("left_", "right_")).id
            np.testing.assert_allclose(
                data.geom_xpos[other], data.geom_xpos[geom] * (1, -1, 1), atol=1e-12, err_msg=name
            )
            np.testing.assert_array_equal(model.geom_size[other], model.geom_size[geom], err_msg=name)


@pytest.mark.parametrize("pose", ["default", *SPEC.poses])
def test_no_contact_in_the_air(model, pose):
    assert contacts(model, posed(model, SPEC.pose(pose))) == set()


@pytest.mark.parametrize("pose", ["default", *SPEC.poses])
def test_only_soles_touch_the_ground(model, pose):
    height = SOLE_HEIGHT.get(pose, SPEC.spawn_height) - 0.0005
    touching = contacts(model, posed(model, SPEC.pose(pose), height))
    soles = {
        f"{side}_{end}_{edge}" for side in ("left", "right") for end in ("heel", "toe") for edge in ("left", "right")
    }
    assert touching == {("ground", sole) for sole in soles}


MODERATE = {  # angles within which shapes of neighbouring links must not meet, left side [rad]
    "hip_yaw": (-0.43, 0.43),
    "hip_pitch": (-1.6, 0.6),
    "hip_roll": (-0.2, 0.6),
    "knee": (-0.12, 1.8),
    "ankle_pitch": (-0.897, 0.523),
    "ankle_roll": (-0.26, 0.26),
    "torso": (-1.2, 1.2),
    "shoulder_pitch": (-1.8, 1.0),
    "shoulder_roll": (-0.1, 1.6),
    "shoulder_yaw": (-1.0, 1.0),
    "elbow": (-0.8, 1.8),
    "wrist_roll": (-2.5, 2.5),
    "wrist_pitch": (-0.46, 0.46),
    "wrist_yaw": (-1.27, 1.27),
}


def moderate_ranges() -> np.ndarray:
    """(2, 27) [rad]."""
    ranges = []
    for joint in SPEC.joints:
        part = re.sub("left_|right_|_joint", "", joint.name)
        flip = joint.name.startswith("right_") and joint.mirror[1] < 0
        ranges.append(sorted(-x if flip else x for x in MODERATE[part]))
    return np.array(ranges).T


def link_distance(model: mujoco.MjModel, one: int, two: int) -> int:
    """Number of joints between two bodies."""
    roots = []
    for body in (one, two):
        chain = [body]
        while chain[-1]:
            chain.append(model.body_parentid[chain[-1]])
        roots.append(set(chain))
    return len(roots[0] ^ roots[1])


def test_neighbouring_links_do_not_collide_over_a_wide_range():
    """In 600 random poses links up to two joints apart never meet, any links in fewer than one in twenty."""
    model = build_model(SPEC, ModelConfig(fixed_base=True), no_ground)
    data = mujoco.MjData(model)
    rng = np.random.default_rng(0)
    meeting = 0
    for angles in rng.uniform(*moderate_ranges(), (600, 27)):
        data.qpos[joint_addresses(model, SPEC.joint_names)[0]] = angles
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_collision(model, data)
        meeting += data.ncon > 0
        for one, two in contacts(model, data):
            bodies = (model.geom(one).bodyid[0], model.geom(two).bodyid[0])
            assert link_distance(model, *bodies) > 2, (one, two)
    assert meeting / 600 < 0.05


def reach(joint_pos: dict[str, float]) -> np.ndarray:
    return np.array([joint_pos.get(n, 0.0) for n in SPEC.joint_names])


@pytest.mark.parametrize(
    ("joint_pos", "pair"),
    [
        ({"left_hip_roll_joint": -0.165, "right_hip_roll_joint": 0.165}, ("left_foot_box", "right_foot_box")),
        ({"left_shoulder_roll_joint": -0.38, "left_shoulder_yaw_joint": -1.2}, ("left_wrist_capsule", "torso_box")),
        ({"left_hip_pitch_joint": -2.8, "left_hip_roll_joint": -0.3}, ("left_thigh_lower_capsule", "torso_box")),
    ],
)
def test_real_self_collisions_are_seen_by_full_and_not_by_feet(joint_pos, pair):
    full = build_model(SPEC, ModelConfig(), no_ground)
    assert {frozenset(p) for p in contacts(full, posed(full, reach(joint_pos)))} >= {frozenset(pair)}
    feet = build_model(SPEC, ModelConfig(collision="feet"), no_ground)
    assert contacts(feet, posed(feet, reach(joint_pos))) == set()


# ---------------------------------------------------------------------------------------------- docs


def test_joint_table_of_the_docs_is_the_spec(model):
    text = (Path(robots.__file__).parents[1] / "docs" / "robots.md").read_text()
    rows = [
        [c.strip(" `") for c in line.strip("|").split("|")]
        for line in text.splitlines()
        if re.match(r"\| \d+ \|", line)
    ]
    assert [row[1] for row in rows] == list(SPEC.joint_names)
    for row in rows:
        joint = SPEC.joint(row[1])
        mine = (joint.motor, *joint.pos_limit, joint.default_pos, joint.stiffness, joint.damping)
        mine += (joint.effort_limit, joint.vel_limit)
        np.testing.assert_allclose([float(row[0]), *map(float, row[3:10])], mine)
        armature, friction = model.joint(joint.name).armature[0], model.joint(joint.name).frictionloss[0]
        np.testing.assert_allclose([float(row[11]), float(row[12])], (armature, friction), rtol=5e-4)
