"""Watch a policy file walk on the reference plant: a video, a strip of pictures, a log, or live in a browser.

    recording = simulate("policy.onnx", command=(0.7, 0.0, 0.0), seconds=10.0)
    save_video(recording, Path("walk.mp4"))
    save_strip(recording, Path("walk.png"))
    save_log(recording, Path("walk_log"))
    view("policy.onnx")                                      # sliders for the command at http://localhost:8080

Pictures are drawn offscreen by MuJoCo through EGL or OSMesa, videos are encoded by ffmpeg; both are imported only when
asked for, and so is `viser`, which serves the live view. Falls do not end a recording: it goes on for a moment, to show
them.
"""

import contextlib
import functools
import importlib
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import mujoco
import numpy as np
import tyro
from numpy.typing import NDArray

from logs.writer import LogWriter
from policies.contract import PolicyContract, load_policy
from policies.evaluate import PUSH_SPEED, Change, Perturbation, Servo, Setup, parse_changes, policy_file, set_up
from robots.errors import UserError
from robots.model import GROUND, ModelConfig, build_spec, joint_addresses
from robots.spec import RobotSpec
from sim.tasks import make_task

if TYPE_CHECKING:
    import trimesh
    from rich.console import Console

Command = tuple[float, float, float]
Image = NDArray[np.uint8]
Array = NDArray[Any]

AFTER_FALL = 1.5
"""A recording ends this long after a fall [s]."""
FOREVER = 1e6
"""Length of an episode that is not meant to end [s]."""


# ---- commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A command that holds from a time on."""

    at: float = 0.0
    """Time [s]."""
    command: Command
    """Forward and left velocity [m/s] and rate of turn [rad/s], in the base frame."""


def parse_script(texts: Sequence[str]) -> tuple[Phase, ...]:
    """Phases from texts such as `5:0.7,0,0.2` (at 5 s: forward, left, turn). Raises UserError."""
    phases = []
    for text in texts:
        at, _, command = text.rpartition(":")
        try:
            forward, left, turn = (float(x) for x in command.split(","))
            phases.append(Phase(at=float(at or 0.0), command=(forward, left, turn)))
        except ValueError as error:
            raise UserError(f"'{text}': expected TIME:FORWARD,LEFT,TURN [s, m/s, m/s, rad/s]") from error
    return _sorted(phases)


def command_at(script: Sequence[Phase], seconds: float) -> Command:
    """The command that holds at a time [s]; to stand before the first phase."""
    command: Command = (0.0, 0.0, 0.0)
    for phase in script:
        if phase.at <= seconds + 1e-9:
            command = phase.command
    return command


def _sorted(script: Sequence[Phase]) -> tuple[Phase, ...]:
    for phase in script:
        if not all(math.isfinite(x) for x in (phase.at, *phase.command)):
            raise UserError(f"a command and its time must be finite, got {phase}")
    return tuple(sorted(script, key=lambda p: p.at))


# ---- simulation ------------------------------------------------------------------------------------------------------


class Walker:
    """One robot and its policy on the reference plant, step by step."""

    def __init__(
        self,
        path: str | Path,
        seed: int = 0,
        perturbation: Perturbation | None = None,
        push_at: Sequence[float] = (),
        command: Command = (0.0, 0.0, 0.0),
    ) -> None:
        """Load a policy file (or a run folder's) and put its robot into the default pose; raises as `evaluate` does."""
        self.policy = load_policy(policy_file(path))
        setup = Setup(
            num=1,
            seconds=FOREVER,
            seed=seed,
            threads=1,
            command=command,
            push_at=tuple(push_at),
            perturbation=perturbation or Perturbation(),
            falls_end=False,
        )
        self._env, self.task = set_up(self.policy.contract, setup)
        self.spec, self.dt = self.task.spec, self.task.plant.control_dt
        self.signals = self._env.signals
        self._max_tilt, self._min_height = _fall_limits(self.policy.contract)
        self._servo = Servo(self.policy, self.spec, 1)

    def reset(self) -> None:
        """Begin a new episode, from another start."""
        self._env.reset()
        self.policy.reset(1)

    def act(self) -> Array:
        """Joint targets (J) [rad] for the present signals; advances the policy. Raises SignalError."""
        return np.array(self._servo(self.signals)[0])

    def step(self, targets: Array, command: Command) -> bool:
        """Hold joint targets (J) for a control step; the policy then sees `command`. False if the simulation broke."""
        self.task.fixed_command = np.array(command, np.float32)
        return not self._env.step(targets[None]).failed[0]

    def push(self, velocity: tuple[float, float]) -> None:
        """Set the horizontal base velocity, world frame [m/s]."""
        self._env.backend.push(np.array([0], np.intp), np.array([velocity]))

    @property
    def fallen(self) -> bool:
        """Whether the base is tilted or low beyond what ends an episode."""
        _, x, y, _ = self.signals["privileged.base_quat"][0]
        up = 1 - 2 * (x**2 + y**2)
        return bool(up < math.cos(self._max_tilt) or self.signals["privileged.base_pos"][0, 2] < self._min_height)


def _fall_limits(contract: PolicyContract) -> tuple[float, float]:
    config = getattr(make_task(contract.task, contract.robot), "config")  # noqa: B009 - Task has none, walking tasks do
    return float(config.max_tilt), float(config.min_height)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One robot over T control steps: row k is what the policy saw before step k, and the targets it set then."""

    spec: RobotSpec
    """The robot."""
    policy: str
    """SHA-256 of the policy file."""
    dt: float
    """Control step [s]."""
    signals: Mapping[str, Array]
    """Signals by name (T, ...): measured, and true ones as `privileged.`."""
    targets: Array
    """Joint targets (T, J) [rad]."""
    phase: Array
    """Phase of the task's gait clock in [0, 1) (T)."""
    period: float
    """Duration of a gait cycle [s]."""
    push_at: tuple[float, ...] = ()
    """Times of pushes [s]."""
    fell_at: float | None = None
    """When the robot fell [s]."""

    @property
    def time(self) -> Array:
        """Time of each row (T) [s]."""
        return np.arange(len(self.targets)) * self.dt


def simulate(
    path: str | Path,
    command: Command = (0.7, 0.0, 0.0),
    seconds: float = 10.0,
    seed: int = 0,
    push_at: Sequence[float] = (),
    set_parameters: Mapping[str, Change] | None = None,
    noise: bool = False,
    script: Sequence[Phase] = (),
) -> Recording:
    """Let one robot follow a command, or a script of commands instead.

    The arguments that `evaluate` has mean the same, and so do its errors. The recording ends early 1.5 s after a fall,
    or where the simulation broke.
    """
    if not seconds > 0:
        raise UserError(f"expected a recording of more than 0 s, found {seconds} s")
    phases = _sorted(script) if script else (Phase(command=command),)
    walker = Walker(
        path, seed, Perturbation(set_parameters=set_parameters or {}, noise=noise), push_at, command_at(phases, 0.0)
    )
    rows: dict[str, list[Array]] = {name: [] for name in walker.signals}
    targets, clock, fell_at, last = [], [], None, round(seconds / walker.dt)
    k = 0
    while k < last:
        for name, values in walker.signals.items():
            rows[name].append(values[0].copy())
        clock.append(float(walker.task.phase[0]))
        targets.append(walker.act())
        k += 1
        whole = walker.step(targets[-1], command_at(phases, k * walker.dt))
        if fell_at is None and (not whole or walker.fallen):
            fell_at = k * walker.dt
            last = min(last, k + (round(AFTER_FALL / walker.dt) if whole else 0))
    return Recording(
        spec=walker.spec,
        policy=walker.policy.sha256,
        dt=walker.dt,
        signals={name: np.stack(values) for name, values in rows.items()},
        targets=np.stack(targets),
        phase=np.array(clock),
        period=walker.task.config.gait.period,
        push_at=tuple(push_at),
        fell_at=fell_at,
    )


def save_log(recording: Recording, path: Path) -> None:
    """Write what the robot measured and was told as a rosbag2 MCAP log; stamps count simulation time from 0.

    Raises UserError if `path` exists or cannot be written.
    """
    names = [n for n in recording.signals if not n.startswith("privileged.")]
    with LogWriter(path, recording.spec, info={"policy": recording.policy, "source": "simulation"}) as log:
        for k, targets in enumerate(recording.targets):
            log.write(round(k * recording.dt * 1e9), {n: recording.signals[n][k] for n in names}, targets)


# ---- pictures --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PictureConfig:
    """How the robot is drawn."""

    width: int = 640
    """[px]"""
    height: int = 480
    """[px]"""
    distance: float = 3.0
    """From the camera to the robot [m]."""
    azimuth: float = 140.0
    """Direction of view relative to the robot's first heading, counterclockwise from above; 180 looks it in the face,
    90 at its right side [deg]."""
    elevation: float = -12.0
    """Angle of view above the horizontal [deg]."""
    samples: int = 4
    """Samples per pixel; 0 draws three times as fast, with jagged edges."""
    caption: bool = True
    """Write time, command and velocity into the picture."""


LOOK_AT = 0.85
"""Height the camera looks at [m]."""
SKY, HORIZON = (0.62, 0.72, 0.84), (0.91, 0.93, 0.96)
TILES = ((0.29, 0.33, 0.38), (0.36, 0.40, 0.46))
NEITHER = (
    "cannot draw without a display: neither EGL nor OSMesa works here; "
    "apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri, or libosmesa6"
)


@functools.cache
def choose_gl() -> str:
    """The offscreen OpenGL that works here: what MUJOCO_GL asks for, else egl, else osmesa.

    Tried in a process of its own, because PyOpenGL keeps the first platform it is given. Raises UserError.
    """
    asked = os.environ.get("MUJOCO_GL", "").lower()
    for name in (asked,) if asked in ("egl", "osmesa") else ("egl", "osmesa"):
        code = f"from mujoco.{name} import GLContext; GLContext(8, 8).make_current()"
        env = {k: v for k, v in os.environ.items() if k != "PYOPENGL_PLATFORM"} | {"MUJOCO_GL": name}
        if subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False).returncode == 0:
            return name
    raise UserError(NEITHER)


def _gl_context(width: int, height: int) -> Any:
    """A new OpenGL context. Raises UserError."""
    if choose_gl() == "egl":
        from mujoco.egl import GLContext
    else:
        from mujoco.osmesa import GLContext
    return GLContext(width, height)


class Stage:
    """Draws poses of a robot offscreen, on a chequered floor; shadows are discs under feet and base, which cost little.

    `mujoco.Renderer` decides for an OpenGL when mujoco is imported, so it cannot be used without MUJOCO_GL set before.
    """

    def __init__(self, spec: RobotSpec, config: PictureConfig) -> None:
        """Prepare pictures of this robot. Raises UserError where nothing can be drawn."""
        self.config, self._spec = config, spec
        self._model = _stage_model(spec, config)
        self._data = mujoco.MjData(self._model)
        self._addresses, _ = joint_addresses(self._model, spec.joint_names)
        self._bodies = [self._model.body(b).id for b in (spec.base_body, *spec.foot_bodies)]
        self._gl = _gl_context(config.width, config.height)
        self._gl.make_current()
        self._context = mujoco.MjrContext(self._model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(self._model, maxgeom=500)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[flag] = False
        self._camera, self._option = mujoco.MjvCamera(), mujoco.MjvOption()
        self._camera.distance, self._camera.elevation = config.distance, config.elevation

    def __enter__(self) -> Self:
        """Nothing to do: pictures can be drawn already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the OpenGL context."""
        self._gl.make_current()
        self._context.free()
        self._gl.free()

    def draw(
        self, base_pos: Array, base_quat: Array, joint_pos: Array, look_at: Array, azimuth: float, caption: str = ""
    ) -> Image:
        """A picture (height, width, 3) of a pose; the camera looks at the point `look_at` (2) [m] of the ground plan.

        `base_pos` (3) [m] and `base_quat` (4, w x y z) in the world, `joint_pos` (J) [rad] in spec order, `azimuth`
        in the world [deg].
        """
        data, camera = self._data, self._camera
        data.qpos[:3], data.qpos[3:7], data.qpos[self._addresses] = base_pos, base_quat, joint_pos
        mujoco.mj_kinematics(self._model, data)
        mujoco.mj_camlight(self._model, data)
        camera.lookat[:], camera.azimuth = (*look_at, LOOK_AT), azimuth
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self._model, data, self._option, None, camera, everything, self._scene)
        self._add_shadows()
        self._gl.make_current()
        view = mujoco.MjrRect(0, 0, self.config.width, self.config.height)
        mujoco.mjr_render(view, self._scene, self._context)
        if caption:
            font, corner = mujoco.mjtFont.mjFONT_NORMAL, mujoco.mjtGridPos.mjGRID_TOPLEFT
            mujoco.mjr_overlay(font, corner, view, caption, "", self._context)
        image = np.empty((view.height, view.width, 3), np.uint8)
        mujoco.mjr_readPixels(image, None, view, self._context)
        return image[::-1]

    def _add_shadows(self) -> None:
        for k, body in enumerate(self._bodies):
            x, y, height = self._data.xpos[body]
            turn = self._data.xmat[body].reshape(3, 3)
            yaw = math.atan2(turn[1, 0], turn[0, 0])
            # A foot's frame lies in its ankle, behind the middle of the sole and above it.
            ahead, size, dark = (0.0, (0.30, 0.24), 0.25) if k == 0 else (0.05, (0.17, 0.07), 0.45)
            fade = 1.0 if k == 0 else max(0.0, 1 - max(0.0, height - 0.05) / 0.3)
            centre = (x + ahead * math.cos(yaw), y + ahead * math.sin(yaw), 0.001 + 0.001 * k)
            self._add_disc(centre, size, yaw, dark * fade)

    def _add_disc(
        self, centre: tuple[float, float, float], size: tuple[float, float], yaw: float, alpha: float
    ) -> None:
        c, s = math.cos(yaw), math.sin(yaw)
        mujoco.mjv_initGeom(
            self._scene.geoms[self._scene.ngeom],
            mujoco.mjtGeom.mjGEOM_ELLIPSOID,
            np.array([*size, 0.0005]),
            np.array(centre),
            np.array([c, -s, 0, s, c, 0, 0, 0, 1.0]),
            np.array([0, 0, 0, alpha], np.float32),
        )
        self._scene.ngeom += 1


def _stage_model(spec: RobotSpec, config: PictureConfig) -> mujoco.MjModel:
    model = build_spec(spec, ModelConfig(collision="feet"), _chequered_floor)
    visual = model.visual
    visual.quality.offsamples, visual.quality.shadowsize = config.samples, 0
    getattr(visual, "global").offwidth, getattr(visual, "global").offheight = config.width, config.height
    visual.headlight.ambient, visual.headlight.diffuse, visual.headlight.specular = [0.32] * 3, [0.28] * 3, [0.05] * 3
    model.add_texture(
        name="sky",
        type=mujoco.mjtTexture.mjTEXTURE_SKYBOX,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_GRADIENT,
        rgb1=HORIZON,
        rgb2=SKY,
        width=64,
        height=384,
    )
    model.worldbody.add_light(
        type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL, dir=(0.4, 0.3, -1), diffuse=[0.55] * 3, specular=[0.1] * 3
    )
    return model.compile()


def _chequered_floor(model: mujoco.MjSpec) -> None:
    model.add_texture(
        name="tiles",
        type=mujoco.mjtTexture.mjTEXTURE_2D,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_CHECKER,
        rgb1=TILES[0],
        rgb2=TILES[1],
        width=256,
        height=256,
    )
    # One repetition of the texture holds 2 x 2 tiles and covers 1 m.
    material = model.add_material(name="tiles", texrepeat=(1, 1), texuniform=True)
    material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = "tiles"
    plane = mujoco.mjtGeom.mjGEOM_PLANE
    model.worldbody.add_geom(name=GROUND, type=plane, size=(0, 0, 1), material="tiles")


def pictures(recording: Recording, rows: Sequence[int], config: PictureConfig) -> Iterator[Image]:
    """Pictures (height, width, 3) of these rows of a recording; the camera follows smoothly. Raises UserError."""
    s = recording.signals
    w, x, y, z = s["privileged.base_quat"][0]
    heading = math.degrees(math.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z)))
    path = _smoothed(s["privileged.base_pos"][:, :2], recording.dt)
    with Stage(recording.spec, config) as stage:
        for k in rows:
            yield stage.draw(
                s["privileged.base_pos"][k],
                s["privileged.base_quat"][k],
                s["privileged.joint_pos"][k],
                path[k],
                heading + config.azimuth,
                _caption(recording, k) if config.caption else "",
            )


def _caption(recording: Recording, k: int) -> str:
    forward, left, turn = recording.signals["command"][k]
    vx, vy, _ = recording.signals["privileged.base_lin_vel"][k]
    wz = recording.signals["privileged.base_ang_vel"][k, 2]
    pushed = any(0 <= k * recording.dt - t < 0.4 for t in recording.push_at)
    return "\n".join(
        (
            f"{k * recording.dt:5.1f} s{'   push' if pushed else ''}",
            f"command  {forward:+.2f} {left:+.2f} m/s {turn:+.2f} rad/s",
            f"velocity {vx:+.2f} {vy:+.2f} m/s {wz:+.2f} rad/s",
        )
    )


def _smoothed(path: Array, dt: float, seconds: float = 0.4) -> Array:
    """A path (T, 2) without sway: averaged over a window of `seconds`, its ends held."""
    half = max(1, round(seconds / dt / 2))
    padded = np.concatenate([np.repeat(path[:1], half, axis=0), path, np.repeat(path[-1:], half, axis=0)])
    kernel = np.ones(2 * half + 1) / (2 * half + 1)
    return np.stack([np.convolve(padded[:, i], kernel, mode="valid") for i in (0, 1)], axis=1)


def save_video(recording: Recording, path: Path, fps: float = 25.0, config: PictureConfig | None = None) -> float:
    """Write an MP4 of a recording (H.264 through imageio-ffmpeg, else what OpenCV has); returns its frames per second.

    Every n-th control step becomes a frame, n such that the rate is nearest to `fps`. The old file stays until the new
    one is complete. Raises UserError where nothing can be drawn, encoded or written.
    """
    config = config or PictureConfig()
    stride = max(1, round(1 / (recording.dt * fps)))
    rate = 1 / (recording.dt * stride)
    frames = pictures(recording, range(0, len(recording.targets), stride), config)
    with _replacing(path) as trial:
        _encoder()(trial, frames, (config.width, config.height), rate)
    return rate


Encoder = Callable[[Path, Iterator[Image], tuple[int, int], float], None]


def _optional(name: str) -> Any:
    """A module that may not be installed; None then."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def _encoder() -> Encoder:
    """Raises UserError where there is none."""
    if _optional("imageio_ffmpeg") is not None:
        return _encode_ffmpeg
    if _optional("cv2") is not None:
        return _encode_opencv
    raise UserError("a video needs an encoder: pip install imageio-ffmpeg")


def _encode_ffmpeg(path: Path, frames: Iterator[Image], size: tuple[int, int], fps: float) -> None:
    writer = _optional("imageio_ffmpeg").write_frames(
        str(path),
        size,
        fps=fps,
        codec="libx264",
        macro_block_size=2,
        ffmpeg_log_level="error",
        output_params=["-crf", "23", "-movflags", "+faststart"],
    )
    writer.send(None)
    try:
        for frame in frames:
            writer.send(np.ascontiguousarray(frame))
    finally:
        writer.close()


def _encode_opencv(path: Path, frames: Iterator[Image], size: tuple[int, int], fps: float) -> None:
    cv2 = _optional("cv2")
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), fps, size)
    if not writer.isOpened():
        raise UserError(f"OpenCV cannot write {path.suffix} here: pip install imageio-ffmpeg")
    for frame in frames:
        writer.write(cv2.cvtColor(np.ascontiguousarray(frame), cv2.COLOR_RGB2BGR))
    writer.release()


def save_strip(
    recording: Recording,
    path: Path,
    frames: int = 8,
    spacing: float = 0.1,
    start: float | None = None,
    config: PictureConfig | None = None,
) -> None:
    """Write a PNG of `frames` pictures side by side, `spacing` [s] apart.

    By default they lie in the middle of the recording, or around the robot's fall; a recording that is too short is
    divided evenly. Raises UserError where nothing can be drawn or written.
    """
    config = config or PictureConfig(width=200, height=400, azimuth=90.0, elevation=-6.0, distance=3.2, caption=False)
    rows = strip_rows(recording, frames, spacing, start)
    margin = ((0, 0), (0, 2), (0, 0))
    images = [np.pad(image, margin, constant_values=255) for image in pictures(recording, rows, config)]
    with _replacing(path) as trial:
        save_png(trial, np.concatenate(images, axis=1)[:, :-2])


def strip_rows(recording: Recording, frames: int, spacing: float, start: float | None = None) -> list[int]:
    """Rows of a recording that a strip shows."""
    last = len(recording.targets) - 1
    stride = max(1, min(round(spacing / recording.dt), last // max(1, frames - 1)))
    latest = max(0, last - stride * (frames - 1))
    if start is not None:
        first = round(start / recording.dt)
    elif recording.fell_at is not None:
        first = round(recording.fell_at / recording.dt) - stride * (frames - 2)
    else:
        first = latest // 2
    return [min(min(max(first, 0), latest) + stride * i, last) for i in range(frames)]


def save_png(path: Path, image: Image) -> None:
    """Write a picture (H, W, 3) as PNG. Raises UserError if that cannot be."""
    from matplotlib.image import imsave

    try:
        imsave(path, np.ascontiguousarray(image), format="png")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to; it takes the place of `path` when all went well. Raises UserError."""
    trial = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield trial
        trial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        trial.unlink(missing_ok=True)


# ---- live ------------------------------------------------------------------------------------------------------------


class View:
    """A robot in the browser, with sliders for its command; served by `viser`. The floor moves under the robot."""

    def __init__(self, walker: Walker, host: str, port: int) -> None:
        """Serve at the first free port from `port` on. Needs `viser`; raises UserError without it."""
        viser = _optional("viser")
        if viser is None:
            raise UserError("the live view needs viser: pip install viser")
        self._walker = walker
        spec = build_spec(walker.spec, ModelConfig(collision="feet"))
        self._model = spec.compile()
        self._data = mujoco.MjData(self._model)
        self._addresses, _ = joint_addresses(self._model, walker.spec.joint_names)
        self.server = viser.ViserServer(host=host, port=port, label="tarsus", verbose=False)
        self._build_scene()
        self._build_controls()

    @property
    def url(self) -> str:
        """Where to point a browser."""
        return f"http://{self.server.get_host()}:{self.server.get_port()}"

    @property
    def command(self) -> Command:
        """What the sliders say."""
        forward, left, turn = (float(s.value) for s in self._sliders)
        return forward, left, turn

    def set_command(self, command: Command) -> None:
        """Move the sliders."""
        for slider, value in zip(self._sliders, command, strict=True):
            slider.value = value

    def take_requests(self) -> None:
        """Do what buttons asked for since the last call."""
        if self._wanted.pop("push", False):
            angle = np.random.default_rng().uniform(0, 2 * math.pi)
            self._walker.push((PUSH_SPEED * math.cos(angle), PUSH_SPEED * math.sin(angle)))
        if self._wanted.pop("again", False):
            self._walker.reset()

    def update(self) -> None:
        """Show the robot's present pose and velocity."""
        s, data = self._walker.signals, self._data
        data.qpos[:3], data.qpos[3:7] = s["privileged.base_pos"][0], s["privileged.base_quat"][0]
        data.qpos[self._addresses] = s["privileged.joint_pos"][0]
        mujoco.mj_kinematics(self._model, data)
        x, y = data.qpos[:2]
        with self.server.atomic():
            self._world.position = (-x, -y, 0.0)
            self._floor.position = (round(x), round(y), 0.0)
            for body, handle in self._handles.items():
                handle.position, handle.wxyz = data.xpos[body], data.xquat[body]
        vx, vy, _ = s["privileged.base_lin_vel"][0]
        wz = s["privileged.base_ang_vel"][0, 2]
        self._text.content = f"velocity {vx:+.2f}, {vy:+.2f} m/s, {wz:+.2f} rad/s" + (
            "  \n**fallen**" if self._walker.fallen else ""
        )

    def close(self) -> None:
        """Stop serving."""
        self.server.stop()

    def _build_scene(self) -> None:
        scene = self.server.scene
        scene.set_up_direction("+z")
        self._world = scene.add_frame("/world", show_axes=False)
        self._floor = scene.add_grid("/world/floor", width=40, height=40, cell_size=0.5, section_size=1.0)
        self._handles = {
            body: scene.add_mesh_trimesh(f"/world/{self._model.body(body).name}", mesh)
            for body, mesh in body_meshes(self._model).items()
        }
        self.server.on_client_connect(_look_at_robot)

    def _build_controls(self) -> None:
        gui, ranges = self.server.gui, self._walker.task.config.command
        rows = (
            ("forward [m/s]", ranges.forward),
            ("left [m/s]", ranges.left),
            ("turn left [rad/s]", ranges.turn),
        )
        self._sliders = [gui.add_slider(n, lo, hi, 0.05, min(max(0.0, lo), hi)) for n, (lo, hi) in rows]
        self._wanted: dict[str, bool] = {}
        stand, push, again = gui.add_button("stand"), gui.add_button("push"), gui.add_button("start again")
        self._text = gui.add_markdown("")
        # The simulation runs in another thread than these callbacks: they leave a note for it.
        stand.on_click(lambda _: self.set_command((0.0, 0.0, 0.0)))
        push.on_click(lambda _: self._wanted.update(push=True))
        again.on_click(lambda _: self._wanted.update(again=True))


def _look_at_robot(client: Any) -> None:
    client.camera.position, client.camera.look_at = (2.4, -2.0, 1.4), (0.0, 0.0, 0.8)


def body_meshes(model: mujoco.MjModel) -> "dict[int, trimesh.Geometry]":
    """Shapes of each body that has some, coloured, in the body's frame: body index to mesh. Needs `trimesh`."""
    import trimesh

    parts: dict[int, list[trimesh.Trimesh]] = {}
    for g in range(model.ngeom):
        if model.geom_group[g] <= 2 and model.geom_bodyid[g]:
            parts.setdefault(int(model.geom_bodyid[g]), []).append(_geom_mesh(model, g))
    return {body: trimesh.util.concatenate(meshes) for body, meshes in parts.items()}


def _geom_mesh(model: mujoco.MjModel, g: int) -> "trimesh.Trimesh":
    import trimesh

    kind, size = mujoco.mjtGeom(int(model.geom_type[g])), model.geom_size[g]
    make, stretch = trimesh.creation, np.ones(3)
    mesh: trimesh.Trimesh
    if kind == mujoco.mjtGeom.mjGEOM_BOX:
        mesh = make.box(extents=2 * size)
    elif kind == mujoco.mjtGeom.mjGEOM_CYLINDER:
        mesh = make.cylinder(radius=size[0], height=2 * size[1], sections=24)
    elif kind == mujoco.mjtGeom.mjGEOM_CAPSULE:
        mesh = make.capsule(height=2 * size[1], radius=size[0], count=[12, 24])
    elif kind in (mujoco.mjtGeom.mjGEOM_SPHERE, mujoco.mjtGeom.mjGEOM_ELLIPSOID):
        mesh = make.icosphere(subdivisions=2)
        stretch = np.full(3, size[0]) if kind == mujoco.mjtGeom.mjGEOM_SPHERE else size
    else:
        raise UserError(f"the live view cannot show a shape of the kind {kind.name} ({model.geom(g).name})")
    place, turn = np.eye(4), np.empty(9)
    mujoco.mju_quat2Mat(turn, model.geom_quat[g])
    place[:3, :3], place[:3, 3] = turn.reshape(3, 3) * stretch, model.geom_pos[g]
    mesh.apply_transform(place)
    material = int(model.geom_matid[g])
    rgba = model.mat_rgba[material] if material >= 0 else model.geom_rgba[g]
    colours = np.tile(np.round(255 * rgba).astype(np.uint8), (len(mesh.vertices), 1))
    mesh.visual = trimesh.visual.ColorVisuals(mesh, vertex_colors=colours)
    return mesh


def view(
    path: str | Path,
    host: str = "127.0.0.1",
    port: int = 8080,
    seconds: float = math.inf,
    command: Command = (0.0, 0.0, 0.0),
    perturbation: Perturbation | None = None,
    seed: int = 0,
    on_start: Callable[[View], None] | None = None,
) -> None:
    """Serve a live view in real time until Ctrl-C, or for `seconds`; a robot that fell starts again after 2 s.

    The command comes from the sliders, which start at `command`. Anyone who reaches host and port can steer, so serve
    on other interfaces than the machine's own on purpose only. `on_start` is told when the page can be opened. Raises
    as `evaluate` does, and UserError without `viser`.
    """
    walker = Walker(path, seed, perturbation, command=command)
    live = View(walker, host, port)
    live.set_command(command)
    if on_start is not None:
        on_start(live)
    try:
        _run_live(walker, live, seconds)
    except KeyboardInterrupt:
        return
    finally:
        live.close()


def _run_live(walker: Walker, live: View, seconds: float, stride: int = 2) -> None:
    start = due = time.perf_counter()
    k, fallen_for = 0, 0.0
    while due - start < seconds:
        live.take_requests()
        if not walker.step(walker.act(), live.command):
            walker.reset()
        fallen_for = fallen_for + walker.dt if walker.fallen else 0.0
        if fallen_for > 2.0:
            walker.reset()
        k += 1
        if k % stride == 0:
            live.update()
        due += walker.dt
        ahead = due - time.perf_counter()
        if ahead > 0:
            time.sleep(ahead)
        elif ahead < -0.2:  # too slow a machine: go on in slow motion instead of racing to catch up
            due -= ahead


# ---- command line ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlayConfig:
    """Watch a policy walk: a video and a strip of pictures, a log if asked for, or live in the browser."""

    policy: Annotated[Path, tyro.conf.Positional]
    """Policy file, or a run folder that holds one."""
    command: Command = (0.7, 0.0, 0.0)
    """Forward and left velocity [m/s] and rate of turn [rad/s]."""
    script: tuple[str, ...] = ()
    """Commands over time instead, such as 0:0.7,0,0 5:0,0,0.6 (TIME:FORWARD,LEFT,TURN)."""
    seconds: float = 10.0
    """Length [s]."""
    seed: int = 0
    """Seed of the starting state, pushes and noise."""
    push_at: tuple[float, ...] = ()
    """Times at which the robot is pushed [s]."""
    set: tuple[str, ...] = ()
    """Physical parameters unlike the nominal ones, such as joint.*.armature=x0.7 or actuator.*.delay=0.02."""
    noise: bool = False
    """Give sensors the noise and bias of training."""
    video: Path = Path("play.mp4")
    """MP4 file to write."""
    strip: Path = Path("play.png")
    """PNG file to write."""
    log: Path | None = None
    """Folder to record a rosbag2 log to."""
    fps: float = 25.0
    """Frames per second of the video."""
    picture: PictureConfig = PictureConfig()
    """Size and camera of the video."""
    viewer: bool = False
    """Serve a live view for a browser instead, until Ctrl-C."""
    host: str = "127.0.0.1"
    """Interface that the live view is served on; 0.0.0.0 lets everyone in the network see and steer."""
    port: int = 8080
    """Port of the live view; the next free one is taken."""


def run_play(config: PlayConfig, console: "Console | None" = None) -> int:
    """Play as the command line asks; returns the exit status. Raises as `simulate`, `save_video` and `view` do."""
    from rich.console import Console

    console = console or Console()
    changes = parse_changes(config.set)
    if config.viewer:
        tell = lambda live: console.print(f"live view at {live.url}; Ctrl-C ends it", soft_wrap=True)  # noqa: E731
        perturbation = Perturbation(set_parameters=changes, noise=config.noise)
        view(config.policy, config.host, config.port, math.inf, config.command, perturbation, config.seed, tell)
        return 0
    script = parse_script(config.script)
    recording = simulate(
        config.policy, config.command, config.seconds, config.seed, config.push_at, changes, config.noise, script
    )
    if recording.fell_at is not None:
        console.print(f"the robot fell after {recording.fell_at:.2f} s")
    if config.log is not None:
        save_log(recording, config.log)
        console.print(f"log: {config.log}", soft_wrap=True)
    save_video(recording, config.video, config.fps, config.picture)
    save_strip(recording, config.strip)
    console.print(f"video: {config.video}, pictures: {config.strip}", soft_wrap=True)
    return 0
