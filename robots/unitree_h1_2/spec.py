"""Unitree H1-2: joint order of the `unitree_hg` bus, limits of the manufacturer's URDF, gains of its examples."""

from pathlib import Path

from robots.spec import JointSpec, RobotSpec

# part: (group, kp [N m/rad], kd [N m s/rad], velocity limit [rad/s], effort limit [N m], sign in the mirror)
PARTS = {
    "hip_yaw": ("legs", 200.0, 2.5, 23.0, 200.0, -1.0),
    "hip_pitch": ("legs", 200.0, 2.5, 23.0, 200.0, 1.0),
    "hip_roll": ("legs", 200.0, 2.5, 23.0, 200.0, -1.0),
    "knee": ("legs", 300.0, 4.0, 14.0, 300.0, 1.0),
    "ankle_pitch": ("legs", 80.0, 2.0, 9.0, 60.0, 1.0),
    "ankle_roll": ("legs", 80.0, 2.0, 9.0, 40.0, -1.0),
    "torso": ("waist", 300.0, 3.0, 23.0, 200.0, -1.0),
    "shoulder_pitch": ("arms", 120.0, 2.0, 9.0, 40.0, 1.0),
    "shoulder_roll": ("arms", 120.0, 2.0, 9.0, 40.0, -1.0),
    "shoulder_yaw": ("arms", 120.0, 2.0, 20.0, 18.0, -1.0),
    "elbow": ("arms", 80.0, 1.0, 20.0, 18.0, 1.0),
    "wrist_roll": ("wrists", 80.0, 1.0, 31.4, 19.0, -1.0),
    "wrist_pitch": ("wrists", 80.0, 1.0, 31.4, 19.0, 1.0),
    "wrist_yaw": ("wrists", 80.0, 1.0, 31.4, 19.0, -1.0),
}
# part: (lower, upper, default) [rad] on the left side; the right side follows from the mirror sign
LEFT = {
    "hip_yaw": (-0.43, 0.43, 0.0),
    "hip_pitch": (-3.14, 2.5, -0.16),
    "hip_roll": (-0.43, 3.14, 0.0),
    "knee": (-0.12, 2.19, 0.36),
    "ankle_pitch": (-0.897334, 0.523598, -0.2),
    "ankle_roll": (-0.261799, 0.261799, 0.0),
    "torso": (-2.35, 2.35, 0.0),
    "shoulder_pitch": (-3.14, 1.57, 0.4),
    "shoulder_roll": (-0.38, 3.4, 0.2),
    "shoulder_yaw": (-2.66, 3.01, 0.0),
    "elbow": (-0.95, 3.18, 0.3),
    "wrist_roll": (-3.01, 2.75, 0.0),
    "wrist_pitch": (-0.4625, 0.4625, 0.0),
    "wrist_yaw": (-1.27, 1.27, 0.0),
}
LEG = ("hip_yaw", "hip_pitch", "hip_roll", "knee", "ankle_pitch", "ankle_roll")
ARM = ("shoulder_pitch", "shoulder_roll", "shoulder_yaw", "elbow", "wrist_roll", "wrist_pitch", "wrist_yaw")
ORDER = (
    *((side, part) for side in ("left", "right") for part in LEG),
    ("", "torso"),
    *((side, part) for side in ("left", "right") for part in ARM),
)


def _joint_name(side: str, part: str) -> str:
    return f"{side}_{part}_joint" if side else f"{part}_joint"


def _joint(motor: int, side: str, part: str) -> JointSpec:
    group, stiffness, damping, vel_limit, effort_limit, sign = PARTS[part]
    lower, upper, default = LEFT[part]
    if side == "right" and sign < 0:
        lower, upper, default = -upper, -lower, 0.0 - default
    other = {"left": "right", "right": "left", "": ""}[side]
    return JointSpec(
        name=_joint_name(side, part),
        group=group,
        motor=motor,
        default_pos=default,
        stiffness=stiffness,
        damping=damping,
        pos_limit=(lower, upper),
        vel_limit=vel_limit,
        effort_limit=effort_limit,
        mirror=(_joint_name(other, part), sign),
    )


def _legs(hip_pitch: float, knee: float, ankle_pitch: float) -> dict[str, float]:
    angles = {"hip_pitch": hip_pitch, "knee": knee, "ankle_pitch": ankle_pitch}
    return {_joint_name(side, part): angle for side in ("left", "right") for part, angle in angles.items()}


SPEC = RobotSpec(
    name="unitree_h1_2",
    mjcf=Path(__file__).parent / "unitree_h1_2.xml",
    joints=tuple(_joint(motor, side, part) for motor, (side, part) in enumerate(ORDER)),
    base_body="pelvis",
    imu_site="imu",
    imu_joints=("torso_joint",),
    foot_bodies=("left_ankle_roll_link", "right_ankle_roll_link"),
    poses={
        "zero": {},
        "stand": _legs(-0.16, 0.36, -0.2),
        "crouch": _legs(-0.4, 0.8, -0.4)
        | {
            "left_shoulder_pitch_joint": 0.4,
            "right_shoulder_pitch_joint": 0.4,
            "left_shoulder_roll_joint": 0.2,
            "right_shoulder_roll_joint": -0.2,
            "left_elbow_joint": 0.3,
            "right_elbow_joint": 0.3,
        },
    },
    spawn_height=1.0151,
)
