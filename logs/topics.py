"""The one table between the project's signals and ROS messages, used in both directions.

Each topic lists, per signal, the message paths that hold its elements *in the signal's order*. That is the whole
conversion: the signal `imu_quat` is (w, x, y, z), its paths name the same four components of the message, and so the
message's own (x, y, z, w) order appears nowhere. `encode` and `decode` work on any object with the message's
attributes, whether from `rosbags` or from `rclpy`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rosbags.interfaces import Nodetype
from rosbags.typesys import Stores, get_typestore
from rosbags.typesys.store import Typestore

from logs.data import Log, Stamps
from robots.errors import UnknownNameError, UserError
from robots.signals import robot_signals
from robots.spec import RobotSpec

TARGETS = "joint_targets"
"""Name that commanded joint positions go by among the signals of a log [rad]."""

JOINT_STATE = "sensor_msgs/msg/JointState"
IMAGE = "sensor_msgs/msg/Image"
CAMERA_INFO = "sensor_msgs/msg/CameraInfo"


@dataclass(frozen=True, kw_only=True)
class Column:
    """Where one signal sits in a message."""

    signal: str
    """Signal name."""
    paths: tuple[str, ...]
    """Dotted paths, one per element in the signal's order; a single array field for a joint signal."""
    covariance: str = ""
    """Covariance field whose first entry is -1 where the message lacks this quantity (sensor_msgs/Imu)."""

    @property
    def per_joint(self) -> bool:
        """Whether the elements are joints, matched by the message's `name` list."""
        return len(self.paths) == 1


@dataclass(frozen=True, kw_only=True)
class TopicSpec:
    """One topic of a log."""

    name: str
    """Topic name."""
    msgtype: str
    """ROS message type."""
    columns: tuple[Column, ...]
    """Signals it carries."""
    frame: Literal["joint", "imu", "base", "sensor"]
    """Frame of its quantities, turned into a frame id by `frame_id`."""


_XYZ = ("x", "y", "z")


def _paths(prefix: str, components: Sequence[str] = _XYZ) -> tuple[str, ...]:
    return tuple(f"{prefix}.{c}" for c in components)


TOPICS = (
    TopicSpec(
        name="/joint_states",
        msgtype=JOINT_STATE,
        frame="joint",
        columns=(
            Column(signal="joint_pos", paths=("position",)),
            Column(signal="joint_vel", paths=("velocity",)),
            Column(signal="joint_effort", paths=("effort",)),
        ),
    ),
    TopicSpec(
        name="/joint_commands",
        msgtype=JOINT_STATE,
        frame="joint",
        columns=(Column(signal=TARGETS, paths=("position",)),),
    ),
    TopicSpec(
        name="/imu",
        msgtype="sensor_msgs/msg/Imu",
        frame="imu",
        columns=(
            Column(
                signal="imu_quat",
                paths=_paths("orientation", ("w", "x", "y", "z")),
                covariance="orientation_covariance",
            ),
            Column(signal="imu_gyro", paths=_paths("angular_velocity"), covariance="angular_velocity_covariance"),
            Column(
                signal="imu_accel", paths=_paths("linear_acceleration"), covariance="linear_acceleration_covariance"
            ),
        ),
    ),
    TopicSpec(
        name="/wrench",
        msgtype="geometry_msgs/msg/WrenchStamped",
        frame="sensor",
        columns=(Column(signal="wrench", paths=_paths("wrench.force") + _paths("wrench.torque")),),
    ),
    TopicSpec(
        name="/cmd_vel",
        msgtype="geometry_msgs/msg/TwistStamped",
        frame="base",
        columns=(Column(signal="command", paths=("twist.linear.x", "twist.linear.y", "twist.angular.z")),),
    ),
)

IMAGES = {"rgb_": "color", "depth_": "depth"}
"""Signal prefix to stream name: `rgb_front` is /camera/front/color/image_raw."""

ENCODINGS: dict[str, tuple[str, int]] = {
    "rgb8": ("u1", 3),
    "bgr8": ("u1", 3),
    "mono8": ("u1", 1),
    "32FC1": ("f4", 1),
    "16UC1": ("u2", 1),
}
"""Image encodings understood: number type and components of a pixel."""

UNITS: dict[str, dict[str, str]] = {
    JOINT_STATE: {"position": "rad or m", "velocity": "rad/s or m/s", "effort": "N m or N"},
    "sensor_msgs/msg/Imu": {"orientation": "1", "angular_velocity": "rad/s", "linear_acceleration": "m/s^2"},
    "geometry_msgs/msg/WrenchStamped": {"wrench.force": "N", "wrench.torque": "N m"},
    "geometry_msgs/msg/TwistStamped": {"twist.linear": "m/s", "twist.angular": "rad/s"},
    "geometry_msgs/msg/Twist": {"linear": "m/s", "angular": "rad/s"},
    "sensor_msgs/msg/Temperature": {"temperature": "degC"},
    "sensor_msgs/msg/BatteryState": {"voltage": "V", "current": "A", "temperature": "degC"},
}
"""Units that the ROS message definitions fix, by type and field."""


@dataclass(frozen=True, kw_only=True)
class CameraModel:
    """Pinhole camera without distortion."""

    width: int
    """Image width [px]."""
    height: int
    """Image height [px]."""
    fx: float
    """Focal length along x [px]."""
    fy: float
    """Focal length along y [px]."""
    cx: float
    """Principal point along x [px]."""
    cy: float
    """Principal point along y [px]."""


@dataclass(frozen=True, kw_only=True)
class SignalSeries:
    """One signal over a whole log."""

    name: str
    """Signal name."""
    stamp_ns: Stamps
    """When each sample was measured, (T,) [ns]."""
    values: NDArray[np.float64]
    """Samples in the signal's order, (T, K)."""
    order: tuple[str, ...]
    """What each column is: joint names or message paths."""


@cache
def typestore() -> Typestore:
    """Message types that logs are written in (ROS 2 Jazzy)."""
    return get_typestore(Stores.ROS2_JAZZY)


def signal_shape(spec: RobotSpec, name: str, joints: Sequence[str]) -> tuple[int, ...]:
    """Expected shape of a signal over `joints`, camera images excepted. Raises UnknownNameError."""
    if name in ("joint_pos", "joint_vel", "joint_effort", TARGETS):
        return (len(joints),)
    if name == "wrench":
        return (6,)
    table = robot_signals(spec)
    if name not in table:
        raise UnknownNameError("signal of a log", name, [*table, "wrench", TARGETS, "rgb_<camera>", "depth_<camera>"])
    return table[name].shape


def image_stream(signal: str) -> str | None:
    """Topic prefix of a camera signal, `/camera/<camera>/<stream>`; None for any other signal."""
    for prefix, stream in IMAGES.items():
        if signal.startswith(prefix) and len(signal) > len(prefix):
            return f"/camera/{signal.removeprefix(prefix)}/{stream}"
    return None


def frame_id(spec: RobotSpec, frame: str) -> str:
    """Frame id of a header: the IMU's site, the base body, the sensor, or none for joints."""
    return {"imu": spec.imu_site, "base": spec.base_body, "sensor": "wrench_sensor", "joint": ""}[frame]


def encode(
    topic: TopicSpec,
    signals: Mapping[str, NDArray[Any]],
    joints: Sequence[str],
    stamp_ns: int,
    frame: str = "",
    message: Any = None,
) -> Any:
    """The message of `topic` that carries those of its signals that are in `signals`.

    `joints` names the elements of joint signals. `message` is an empty message to fill (from rclpy, say); by default
    a new one of `rosbags`. A joint signal that is absent leaves its array empty; an absent part of an Imu is marked by
    a covariance of -1, as the message definition asks.
    """
    message = blank(topic.msgtype) if message is None else message
    stamp(message, stamp_ns, frame)
    if any(c.per_joint for c in topic.columns):
        message.name = list(joints)
    for column in topic.columns:
        if column.signal not in signals:
            if column.covariance:
                getattr(message, column.covariance)[0] = -1.0
        elif column.per_joint:
            setattr(message, column.paths[0], np.asarray(signals[column.signal], dtype=np.float64))
        else:
            for path, value in zip(column.paths, signals[column.signal], strict=True):
                _set(message, path, float(value))
    return message


def decode(topic: TopicSpec, message: Any, joints: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    """The signals that a message of `topic` carries; joint signals in the order `joints`, whatever the message's.

    Raises UserError if the message lacks one of `joints`.
    """
    signals = {}
    for column in topic.columns:
        if column.covariance and getattr(message, column.covariance)[0] == -1.0:
            continue
        if not column.per_joint:
            signals[column.signal] = np.array([_get(message, p) for p in column.paths], dtype=np.float64)
        elif len(getattr(message, column.paths[0])):
            values = np.asarray(getattr(message, column.paths[0]), dtype=np.float64)
            signals[column.signal] = values[_order(topic.name, message.name, joints)]
    return signals


def read_signal(log: Log, name: str, joints: Sequence[str] | None = None) -> SignalSeries:
    """A signal over a whole log, through the same table; joint signals in the order `joints` (the log's by default).

    Raises UnknownNameError for an unknown signal or a log without its topic, UserError for a missing joint or stamps.
    """
    topic_spec, column = _column(name)
    topic = log.topic(topic_spec.name)
    if topic.stamp_ns is None:
        raise UserError(f"{topic.name} of {log.path} has no stamps")
    if column.per_joint:
        channel = topic.channel(column.paths[0])
        order = tuple(channel.names if joints is None else joints)
        values = channel.values[:, _order(topic.name, channel.names, order)]
    else:
        order = column.paths
        values = np.stack([topic.channel(p.rpartition(".")[0]).element(p.rpartition(".")[2]) for p in order], axis=1)
    return SignalSeries(name=name, stamp_ns=topic.stamp_ns, values=values.astype(np.float64), order=order)


def _column(signal: str) -> tuple[TopicSpec, Column]:
    table = {c.signal: (t, c) for t in TOPICS for c in t.columns}
    if signal not in table:
        raise UnknownNameError("signal of a log", signal, table)
    return table[signal]


def _order(topic: str, have: Sequence[str], want: Sequence[str]) -> list[int]:
    index = {n: i for i, n in enumerate(have)}
    missing = [n for n in want if n not in index]
    if missing:
        raise UserError(f"{topic} lacks the joints {', '.join(missing)}; it has {', '.join(have) or 'no names'}")
    return [index[n] for n in want]


def encode_image(image: NDArray[Any], stamp_ns: int, frame: str) -> Any:
    """An Image message: (H, W, 3) uint8 as rgb8, (H, W) metres as 32FC1. Raises UserError for any other shape."""
    if image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8:
        encoding, pixels = "rgb8", np.ascontiguousarray(image)
    elif image.ndim == 2 and np.issubdtype(image.dtype, np.floating):
        encoding, pixels = "32FC1", np.ascontiguousarray(image, dtype="<f4")
    else:
        raise UserError(
            f"an image must be (H, W, 3) uint8 or (H, W) in metres, found {image.shape} of {image.dtype}: convert it"
        )
    message = blank(IMAGE)
    stamp(message, stamp_ns, frame)
    message.height, message.width, message.encoding = image.shape[0], image.shape[1], encoding
    message.step = pixels.nbytes // max(1, image.shape[0])
    message.data = pixels.reshape(-1).view(np.uint8)
    return message


def decode_image(message: Any) -> NDArray[Any]:
    """The pixels of an Image: rgb (H, W, 3) uint8, grey (H, W) uint8, or depth (H, W) [m] float32.

    Raises UserError for an encoding that is not in `ENCODINGS` or a size that does not fit the data.
    """
    if message.encoding not in ENCODINGS:
        raise UnknownNameError("image encoding", message.encoding, ENCODINGS)
    kind, components = ENCODINGS[message.encoding]
    dtype = np.dtype((">" if message.is_bigendian else "<") + kind)
    width = message.width * components * dtype.itemsize
    data = np.asarray(message.data, dtype=np.uint8)
    if message.step < width or len(data) < message.height * message.step:
        raise UserError(
            f"an image of {message.height} rows of {message.step} bytes ({message.width} px, {message.encoding}) "
            f"does not fit {len(data)} bytes"
        )
    # Rows may be padded: step counts the padding, width does not.
    rows = data[: message.height * message.step].reshape(message.height, message.step)[:, :width]
    pixels: NDArray[Any] = np.ascontiguousarray(rows).view(dtype).reshape(message.height, message.width, components)
    if message.encoding == "bgr8":
        return pixels[..., ::-1]
    if message.encoding == "16UC1":
        return pixels[..., 0].astype(np.float32) * np.float32(0.001)
    if components == 1:
        return pixels[..., 0].astype(dtype.newbyteorder("="))
    return pixels


def camera_info(camera: CameraModel, stamp_ns: int, frame: str) -> Any:
    """The CameraInfo message of a camera."""
    message = blank(CAMERA_INFO)
    stamp(message, stamp_ns, frame)
    message.width, message.height, message.distortion_model = camera.width, camera.height, "plumb_bob"
    message.d = np.zeros(5)
    message.k = np.array([camera.fx, 0, camera.cx, 0, camera.fy, camera.cy, 0, 0, 1], dtype=np.float64)
    message.r = np.eye(3).ravel()
    message.p = np.insert(message.k.reshape(3, 3), 3, 0.0, axis=1).ravel()
    return message


def blank(msgtype: str) -> Any:
    """A message of this type with every field zero or empty. Raises UserError for an unknown type."""
    store = typestore()
    if msgtype not in store.fielddefs:
        raise UnknownNameError("message type", msgtype, store.fielddefs)
    return store.types[msgtype](**{name: _zero(desc) for name, desc in store.fielddefs[msgtype][1]})


def _zero(desc: Any) -> Any:
    kind, what = desc
    if kind == Nodetype.NAME:
        return blank(what)
    if kind == Nodetype.BASE:
        return "" if what[0] == "string" else 0
    (inner_kind, inner), size = what
    if inner_kind == Nodetype.BASE and inner[0] != "string":
        return np.zeros(size if kind == Nodetype.ARRAY else 0, dtype=_DTYPES.get(inner[0], inner[0]))
    return [_zero((inner_kind, inner)) for _ in range(size)] if kind == Nodetype.ARRAY else []


_DTYPES = {"byte": "uint8", "char": "uint8", "octet": "uint8"}


def stamp(message: Any, stamp_ns: int, frame: str) -> None:
    """Fill a message's header."""
    message.header.stamp.sec, message.header.stamp.nanosec = divmod(int(stamp_ns), 10**9)
    message.header.frame_id = frame


def _get(message: Any, path: str) -> Any:
    for name in path.split("."):
        message = getattr(message, name)
    return message


def _set(message: Any, path: str, value: float) -> None:
    parent, _, name = path.rpartition(".")
    setattr(_get(message, parent) if parent else message, name, value)
