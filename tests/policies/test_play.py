import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import mujoco
import numpy as np
import pytest
from rich.console import Console

from logs import open_log, read_signal
from policies import play
from policies.contract import load_policy
from policies.play import (
    Phase,
    PictureConfig,
    PlayConfig,
    Recording,
    Stage,
    Walker,
    body_meshes,
    choose_gl,
    command_at,
    parse_script,
    run_play,
    save_log,
    save_strip,
    save_video,
    simulate,
    strip_rows,
    view,
)
from robots.errors import UnknownNameError, UserError
from robots.model import build_model

SMALL = PictureConfig(width=96, height=64, samples=0)


@pytest.fixture(scope="module")
def recording(hold) -> Recording:
    script = (Phase(command=(0.5, 0.0, 0.0)), Phase(at=0.2, command=(0.0, 0.1, -0.3)))
    return simulate(hold, seconds=0.5, script=script, push_at=(0.3,), noise=True)


# commands


def test_a_script_is_read_in_order_of_time():
    assert parse_script(["5:0,0,-0.6", "0.7,0,0.2"]) == (
        Phase(at=0.0, command=(0.7, 0.0, 0.2)),
        Phase(at=5.0, command=(0.0, 0.0, -0.6)),
    )


@pytest.mark.parametrize("text", ["", "0.7", "1:0.7,0", "1:a,0,0", "1:nan,0,0", "inf:0,0,0", "1:2:0,0,0"])
def test_a_script_that_means_nothing_is_refused(text):
    with pytest.raises(UserError):
        parse_script([text])


def test_a_command_holds_until_the_next_one():
    script = parse_script(["1:0.5,0,0", "2:0,0,0.6"])
    commands = [command_at(script, t) for t in (0.0, 0.99, 1.0, 1.99, 2.0, 9.0)]
    stand, walk, turn = (0.0, 0.0, 0.0), (0.5, 0.0, 0.0), (0.0, 0.0, 0.6)
    assert commands == [stand, stand, walk, walk, turn, turn]


# recordings


def test_a_recording_has_a_row_per_control_step_and_follows_the_script(recording):
    assert recording.time == pytest.approx(0.02 * np.arange(25))
    command = recording.signals["command"]
    np.testing.assert_array_equal(command[:10], np.tile(np.float32([0.5, 0.0, 0.0]), (10, 1)))
    np.testing.assert_array_equal(command[10:], np.tile(np.float32([0.0, 0.1, -0.3]), (15, 1)))


def test_the_gait_clock_runs_with_the_recording(recording):
    turns = recording.phase - recording.time / recording.period
    assert turns - np.round(turns) == pytest.approx(0, abs=1e-5)


def test_targets_of_a_row_are_what_the_policy_makes_of_its_signals(hold, recording):
    policy = load_policy(hold)
    again = [policy({n: recording.signals[n][k] for n in ("command",)})[0] for k in range(len(recording.targets))]
    np.testing.assert_array_equal(recording.targets, again)


def test_noise_disturbs_what_is_measured_and_not_what_is_true(hold, recording):
    assert np.abs(recording.signals["joint_pos"] - recording.signals["privileged.joint_pos"]).max() > 1e-3
    clean = simulate(hold, seconds=0.1)
    np.testing.assert_array_equal(clean.signals["joint_pos"], clean.signals["privileged.joint_pos"])


def test_a_recording_goes_on_for_a_moment_after_a_fall(hold):
    fallen = simulate(hold, seconds=10.0)
    assert 0.5 < fallen.fell_at < 4.0
    assert len(fallen.targets) * fallen.dt == pytest.approx(fallen.fell_at + play.AFTER_FALL)
    assert fallen.signals["privileged.base_pos"][-1, 2] < 0.6


def test_a_recording_depends_on_its_seed_alone(hold):
    def pose(seed):
        return simulate(hold, seconds=0.2, seed=seed).signals["privileged.joint_pos"]

    np.testing.assert_array_equal(pose(1), pose(1))
    assert not np.array_equal(pose(1), pose(2))


def test_a_recording_of_no_time_is_refused(hold):
    with pytest.raises(UserError, match="more than 0 s"):
        simulate(hold, seconds=0.0)


def test_a_push_moves_the_robot(hold):
    walker = Walker(hold)
    walker.push((0.8, -0.6))
    walker.step(walker.act(), (0.0, 0.0, 0.0))
    turn = np.empty(9)
    mujoco.mju_quat2Mat(turn, walker.signals["privileged.base_quat"][0].astype(float))
    velocity = turn.reshape(3, 3) @ walker.signals["privileged.base_lin_vel"][0]
    assert velocity[:2] == pytest.approx([0.8, -0.6], abs=0.15)


def test_starting_again_stands_the_robot_up(hold):
    walker = Walker(hold)
    while not walker.fallen:
        walker.step(walker.act(), (0.0, 0.0, 0.0))
    walker.reset()
    assert not walker.fallen


# logs


def test_a_log_holds_what_was_measured_and_commanded(recording, tmp_path):
    save_log(recording, tmp_path / "log")
    log = open_log(tmp_path / "log")
    assert log.info["policy"] == recording.policy
    assert log.info["robot"] == recording.spec.name
    for name, values in (*recording.signals.items(), ("joint_targets", recording.targets)):
        if not name.startswith("privileged."):
            series = read_signal(log, name)
            np.testing.assert_array_equal(series.stamp_ns, 20_000_000 * np.arange(25))
            np.testing.assert_array_equal(series.values, values)


def test_a_log_is_never_overwritten(recording, tmp_path):
    with pytest.raises(UserError, match="not overwritten"):
        save_log(recording, tmp_path)


# pictures


def test_a_strip_lies_in_the_middle_or_around_the_fall(recording):
    long = replace(recording, targets=np.zeros((501, 27)))
    assert strip_rows(long, 8, 0.1) == [232 + 5 * i for i in range(8)]
    assert strip_rows(long, 8, 0.1, start=0.0) == [5 * i for i in range(8)]
    assert strip_rows(long, 8, 0.1, start=99.0) == [465 + 5 * i for i in range(8)]
    assert strip_rows(replace(long, fell_at=2.0), 8, 0.1) == [70 + 5 * i for i in range(8)]
    assert strip_rows(replace(long, targets=np.zeros((15, 27))), 8, 0.1) == [2 * i for i in range(8)]
    assert strip_rows(replace(long, targets=np.zeros((1, 27))), 8, 0.1) == [0] * 8


@pytest.mark.usefixtures("drawing")
def test_a_picture_shows_the_robot_where_it_stands(h1_2):
    upright, pose = np.array([1.0, 0, 0, 0]), h1_2.array("default_pos")
    with Stage(h1_2, SMALL) as stage:

        def drawn(x, y):
            return stage.draw(np.array([x, y, h1_2.spawn_height]), upright, pose, np.zeros(2), 90.0).astype(int)

        empty, ahead = drawn(1e3, 1e3), drawn(0.0, 0.0)
        right = drawn(0.7, 0.0)  # looking along +y, +x lies on the right
    assert empty.shape == (64, 96, 3)

    def column(image):
        return np.flatnonzero((np.abs(image - empty).max(axis=2) > 40).any(axis=0)).mean()

    assert column(ahead) == pytest.approx(48, abs=4)
    assert column(right) > column(ahead) + 10


@pytest.mark.usefixtures("drawing")
def test_a_caption_is_written_into_the_picture(recording):
    plain, captioned = (
        next(play.pictures(recording, [0], replace(SMALL, caption=caption))).astype(int) for caption in (False, True)
    )
    assert np.abs(plain - captioned).max() > 50


@pytest.mark.usefixtures("drawing")
def test_a_strip_is_a_row_of_pictures(recording, tmp_path):
    from matplotlib.image import imread

    save_strip(recording, tmp_path / "new" / "strip.png", frames=3, config=SMALL)
    assert imread(tmp_path / "new" / "strip.png").shape == (64, 3 * 96 + 2 * 2, 3 + 1)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["strip.png"]


@pytest.mark.usefixtures("drawing")
def test_a_video_has_every_second_control_step_and_can_be_played_in_a_browser(recording, tmp_path):
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    assert save_video(recording, tmp_path / "walk.mp4", config=SMALL) == pytest.approx(25.0)
    frames, seconds = ffmpeg.count_frames_and_secs(str(tmp_path / "walk.mp4"))
    assert (frames, seconds) == (13, pytest.approx(13 / 25, abs=0.01))
    told = subprocess.run(
        [ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-i", tmp_path / "walk.mp4"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "h264" in told.stderr
    assert "yuv420p" in told.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["walk.mp4"]


@pytest.mark.usefixtures("drawing")
def test_without_ffmpeg_opencv_writes_the_video(recording, tmp_path, monkeypatch):
    cv2 = pytest.importorskip("cv2")
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    save_video(recording, tmp_path / "walk.mp4", config=SMALL)
    assert cv2.VideoCapture(str(tmp_path / "walk.mp4")).get(cv2.CAP_PROP_FRAME_COUNT) == 13


@pytest.mark.usefixtures("drawing")
def test_a_video_that_fails_leaves_the_old_one(recording, tmp_path, monkeypatch):
    path = tmp_path / "walk.mp4"
    path.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(play, "_encoder", lambda: full)
    with pytest.raises(UserError, match=r"cannot write .*walk\.mp4: No space left on device"):
        save_video(recording, path, config=SMALL)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("walk.mp4", "old")]


def test_without_an_encoder_the_error_says_what_to_install(monkeypatch):
    for name in ("imageio_ffmpeg", "cv2"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="pip install imageio-ffmpeg"):
        play._encoder()


def test_without_opengl_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(play.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    with pytest.raises(UserError, match="apt-get install libegl1"):
        choose_gl.__wrapped__()


def test_the_opengl_that_works_is_chosen_and_a_wish_is_heeded(monkeypatch):
    def only(working):
        return lambda _, env, **__: SimpleNamespace(returncode=int(env["MUJOCO_GL"] != working))

    monkeypatch.delenv("MUJOCO_GL", raising=False)
    for name in ("egl", "osmesa"):
        monkeypatch.setattr(play.subprocess, "run", only(name))
        assert choose_gl.__wrapped__() == name
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(UserError):
        choose_gl.__wrapped__()


# the live view


def test_meshes_of_the_live_view_fill_the_space_of_the_shapes(h1_2):
    pytest.importorskip("trimesh")
    model = build_model(h1_2)
    meshes = body_meshes(model)
    pelvis = model.body("pelvis").id
    box = model.geom("pelvis_box")
    lower, upper = meshes[pelvis].bounds
    assert (lower <= box.pos - box.size + 1e-9).all()
    assert (upper >= box.pos + box.size - 1e-9).all()
    shown = {int(b) for b, group in zip(model.geom_bodyid, model.geom_group, strict=True) if b and group <= 2}
    assert set(meshes) == shown


def test_a_mesh_stands_in_its_body_as_the_shape_does(h1_2):
    pytest.importorskip("trimesh")
    model = build_model(h1_2)
    for g in range(model.ngeom):
        if model.geom_bodyid[g] and model.geom_group[g] <= 2:
            mesh = play._geom_mesh(model, g)
            turn = np.empty(9)
            mujoco.mju_quat2Mat(turn, model.geom_quat[g])
            local = (mesh.vertices - model.geom_pos[g]) @ turn.reshape(3, 3)
            half = model.geom_aabb[g, 3:]  # MuJoCo's own bounding box of the shape, in its frame
            np.testing.assert_allclose(np.abs(local).max(axis=0), half, rtol=0.02)


def test_a_browser_gets_a_page_and_the_whole_robot(hold):
    viser = pytest.importorskip("viser")
    from websockets.sync.client import connect

    walker = Walker(hold)
    live = play.View(walker, "127.0.0.1", 18480)
    meshes = body_meshes(build_model(walker.spec)).values()
    wanted, got = sum(4 * mesh.vertices.size for mesh in meshes), {"bytes": 0}

    def visit():
        got["page"] = urllib.request.urlopen(live.url).read()
        protocol = [f"viser-v{viser.__version__}"]
        with connect(live.url.replace("http", "ws"), subprotocols=protocol, max_size=None) as socket:
            while got["bytes"] < wanted:
                got["bytes"] += len(socket.recv(timeout=60))

    client = threading.Thread(target=visit, daemon=True)
    client.start()
    while client.is_alive():
        walker.step(walker.act(), live.command)
        live.update()
        client.join(0.02)
    live.close()
    assert b"<html" in got["page"].lower()
    assert got["bytes"] >= wanted


def test_the_live_view_runs_for_its_time_with_the_command_given(hold):
    pytest.importorskip("viser")
    seen = []
    view(hold, port=18480, seconds=0.3, command=(0.4, 0.0, -0.2), on_start=lambda v: seen.extend([v.url, v.command]))
    url, command = seen
    assert command == (0.4, 0.0, -0.2)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=5)


def test_the_live_view_does_what_buttons_ask_for(hold, monkeypatch):
    pytest.importorskip("viser")
    walker = Walker(hold)
    live = play.View(walker, "127.0.0.1", 18490)
    try:
        pushed, restarted = [], []
        monkeypatch.setattr(walker, "push", pushed.append)
        monkeypatch.setattr(walker, "reset", lambda: restarted.append(True))
        live._wanted.update(push=True, again=True)
        for _ in range(2):
            live.take_requests()
        assert np.hypot(*pushed[0]) == pytest.approx(play.PUSH_SPEED)
        assert (len(pushed), restarted) == (1, [True])
        live.set_command((0.3, 0.1, 0.0))
        assert live.command == (0.3, 0.1, 0.0)
    finally:
        live.close()


def test_without_viser_the_error_says_what_to_install(hold, monkeypatch):
    monkeypatch.setitem(sys.modules, "viser", None)
    with pytest.raises(UserError, match="pip install viser"):
        view(hold, seconds=0.1)


# command line


@pytest.mark.usefixtures("drawing")
def test_the_command_writes_what_it_says(hold, tmp_path):
    console = Console(record=True, width=400)
    config = PlayConfig(
        policy=hold,
        seconds=0.3,
        video=tmp_path / "a.mp4",
        strip=tmp_path / "a.png",
        log=tmp_path / "log",
        picture=SMALL,
    )
    assert run_play(config, console) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"a.mp4", "a.png", "log"}
    assert str(tmp_path / "a.mp4") in console.export_text()


def test_the_command_refuses_unknown_parameters(hold, tmp_path):
    with pytest.raises(UnknownNameError):
        run_play(PlayConfig(policy=hold, set=("joint.nose.damping=1",), video=tmp_path / "a.mp4"), Console())
