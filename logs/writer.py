"""Write a log: a rosbag2 directory with MCAP storage, the same from simulation, simulated robot and real robot."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from rosbags.interfaces import Connection
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.rosbag2.errors import WriterError
from rosbags.rosbag2.storage_mcap import McapWriter

from logs import topics
from logs.topics import CAMERA_INFO, IMAGE, TARGETS, TOPICS, CameraModel
from robots.errors import UserError
from robots.spec import RobotSpec

BAG_VERSION: Literal[9] = 9
MAX_STAMP_NS = 2**31 * 10**9
"""ROS header stamps hold 31 bits of seconds."""


class LogWriter:
    """Writes signals as ROS messages, one call per control step.

    Use as a context manager; the log is completed on leaving, also when the code inside raises. A log that already
    exists is never touched. If the process is killed, everything older than `flush_period` is in the file and can be
    read (see `logs.open_log`); if the disk fills up, `write` raises and what was flushed before stays readable.

        with LogWriter(path, spec) as log:
            log.write(stamp_ns, {"joint_pos": q, "joint_vel": qd, "imu_quat": quat}, targets=action)
    """

    def __init__(
        self,
        path: Path,
        spec: RobotSpec,
        *,
        joints: Sequence[str] | None = None,
        target_joints: Sequence[str] | None = None,
        cameras: Mapping[str, CameraModel] | None = None,
        info: Mapping[str, str] | None = None,
        flush_period: float = 1.0,
    ) -> None:
        """Prepare to write the directory `path`; nothing is created before the context is entered.

        Args:
            path: Directory to create; it must not exist.
            spec: Robot that the signals belong to.
            joints: Order of joint signals; all joints in spec order by default.
            target_joints: Order of `targets`; `joints` by default.
            cameras: Camera name to model; a CameraInfo is written beside every image of these cameras.
            info: Further facts to store with the log.
            flush_period: Data younger than this may be lost if the process is killed [s of log time].

        Raises:
            UnknownNameError: A joint that the robot lacks.
            UserError: `path` exists.
        """
        self.path = Path(path)
        self.joints = tuple(spec.joint_names if joints is None else joints)
        self.target_joints = self.joints if target_joints is None else tuple(target_joints)
        spec.index([*self.joints, *self.target_joints])
        self._spec = spec
        self._cameras = dict(cameras or {})
        self._flush_ns = int(flush_period * 1e9)
        self._flushed_ns: int | None = None
        self._connections: dict[str, Connection] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._failed = False
        self._open = False
        self.messages = 0
        """Messages written so far."""
        try:
            self._writer = Writer(self.path, version=BAG_VERSION, storage_plugin=StoragePlugin.MCAP)
        except WriterError as error:
            raise self._exists() from error
        for key, value in {"robot": spec.name, "model_hash": spec.model_hash, **(info or {})}.items():
            self._writer.set_custom_data(key, value)

    def __enter__(self) -> Self:
        """Create the directory. Raises UserError if it exists or can't be created."""
        try:
            self._writer.open()
        except WriterError as error:
            raise self._exists() from error
        except OSError as error:
            raise UserError(f"cannot create the log {self.path}: {error.strerror}; choose another place") from error
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Complete the log, also after an error inside the block."""
        self.close()

    def write(
        self,
        stamp_ns: int,
        signals: Mapping[str, NDArray[Any]],
        targets: NDArray[Any] | None = None,
        *,
        receive_ns: int | None = None,
    ) -> None:
        """Write one instant.

        Args:
            stamp_ns: When the signals were measured [ns]; the header stamp of every message.
            signals: Signal name to value without batch axis; only topics with a signal present are written.
            targets: Commanded joint positions, (len(target_joints),) [rad].
            receive_ns: When they arrived at the recorder [ns]; `stamp_ns` by default.

        Raises:
            UnknownNameError: A signal that no topic carries.
            UserError: Wrong shape, a stamp that ROS can't hold, a closed log, or a disk that takes no more.
        """
        received = stamp_ns if receive_ns is None else receive_ns
        self._check_ready(stamp_ns, received)
        values = dict(signals) if targets is None else {**signals, TARGETS: targets}
        images = {n: np.asarray(v) for n, v in values.items() if topics.image_stream(n) is not None}
        vectors = {n: self._checked(n, v) for n, v in values.items() if n not in images}
        self._flush_if_due(received)
        for topic in TOPICS:
            if any(c.signal in vectors for c in topic.columns):
                joints = self.target_joints if topic.columns[0].signal == TARGETS else self.joints
                frame = topics.frame_id(self._spec, topic.frame)
                self._put(topic.name, topic.msgtype, topics.encode(topic, vectors, joints, stamp_ns, frame), received)
        for name, image in images.items():
            self._write_image(name, image, stamp_ns, received)

    def close(self) -> None:
        """Write index and metadata and close the file; nothing happens the second time.

        Raises UserError if the disk takes no more. After a failed write the file is closed as it is.
        """
        if not self._open:
            return
        self._open = False
        if self._failed:
            self._abandon()
            return
        try:
            self._writer.close()
        except OSError as error:
            self._abandon()
            raise self._disk_error(error) from error

    def _write_image(self, name: str, image: NDArray[Any], stamp_ns: int, received: int) -> None:
        stream = str(topics.image_stream(name))
        camera = stream.split("/")[2]
        self._put(f"{stream}/image_raw", IMAGE, topics.encode_image(image, stamp_ns, camera), received)
        if camera in self._cameras:
            info = topics.camera_info(self._cameras[camera], stamp_ns, camera)
            self._put(f"{stream}/camera_info", CAMERA_INFO, info, received)

    def _put(self, topic: str, msgtype: str, message: Any, received: int) -> None:
        store = topics.typestore()
        try:
            if topic not in self._connections:
                self._connections[topic] = self._writer.add_connection(topic, msgtype, typestore=store)
            self._writer.write(self._connections[topic], received, store.serialize_cdr(message, msgtype))
        except OSError as error:
            self._failed = True
            raise self._disk_error(error) from error
        self.messages += 1

    def _flush_if_due(self, now_ns: int) -> None:
        """Hand what is pending to the operating system, so that a killed process loses little.

        `rosbags` keeps up to 1 MiB in memory, which is many seconds of joint states.
        """
        if self._flushed_ns is None:
            self._flushed_ns = now_ns
        storage = self._writer.storage
        if now_ns - self._flushed_ns < self._flush_ns or not isinstance(storage, McapWriter):
            return
        try:
            if storage.chunk.msgs:
                storage.close_chunk()
            storage.bio.flush()
        except OSError as error:
            self._failed = True
            raise self._disk_error(error) from error
        self._flushed_ns = now_ns

    def _checked(self, name: str, value: NDArray[Any]) -> NDArray[Any]:
        if name not in self._shapes:
            joints = self.target_joints if name == TARGETS else self.joints
            self._shapes[name] = topics.signal_shape(self._spec, name, joints)
        array = np.asarray(value)
        if array.shape != self._shapes[name]:
            raise UserError(f"signal {name}: expected shape {self._shapes[name]}, found {array.shape}")
        return array

    def _check_ready(self, *stamps: int) -> None:
        if not self._open or self._failed:
            raise UserError(f"the log {self.path} is not open for writing: use `with LogWriter(...)`, one per log")
        for stamp in stamps:
            if not 0 <= stamp < MAX_STAMP_NS:
                raise UserError(f"stamp {stamp} ns does not fit a ROS stamp: expected 0 to {MAX_STAMP_NS - 1} ns")

    def _abandon(self) -> None:
        # The first error is the one to tell; closing a full disk's file fails once more.
        with contextlib.suppress(OSError):
            self._writer.abort()

    def _exists(self) -> UserError:
        return UserError(f"{self.path} exists and is not overwritten: move it away or choose another name")

    def _disk_error(self, error: OSError) -> UserError:
        return UserError(
            f"could not write the log {self.path} after {self.messages} messages: {error.strerror}; "
            "what was written before stays readable, free some space and record again"
        )
