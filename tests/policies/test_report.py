import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from policies.contract import read_contract
from policies.evaluate import Estimate, Evaluation, score_policy
from policies.play import Recording, save_log
from policies.report import (
    ReportConfig,
    contacts,
    curves_figure,
    gait_figure,
    gait_rows,
    load_figure,
    moving_average,
    read_curves,
    run_report,
    velocity_figure,
    write_report,
)
from robots.errors import UserError

DT, PERIOD = 0.02, 0.8
EVALUATION = Evaluation(
    scenarios={
        "easy": {
            "survival": Estimate(value=1.0, lo=0.98, hi=1.0),
            "e_vel": Estimate(value=0.25, lo=0.2, hi=0.3),
            "torque_hits": Estimate(value=0.0125),
        },
        "stand": {"survival": Estimate(value=1.0), "drift": Estimate(value=0.004)},
    },
    protocol={"episodes": 200, "seconds": 20.0, "seed": 7},
    steps_per_s=1.0,
)


@pytest.fixture(scope="module")
def walk(h1_2) -> Recording:
    """Six seconds of a robot that stands for one, then steps at 0.5 m/s: hand-made."""
    time = np.arange(300) * DT
    phase = np.where(time < 1.0, 0.0, (time - 1.0) / PERIOD % 1)
    joints = len(h1_2.joints)
    swings = np.stack([phase > 0.5, (phase > 0) & (phase < 0.45)], axis=1)
    foot_pos = np.zeros((300, 2, 3))
    foot_pos[:, :, 2] = 0.045 + 0.08 * swings
    signals = {
        "command": np.where(time[:, None] < 1.0, 0.0, [[0.5, 0.0, 0.2]]),
        "joint_pos": np.tile(h1_2.array("default_pos"), (300, 1)),
        "joint_vel": np.zeros((300, joints)),
        "privileged.joint_pos": np.tile(h1_2.array("default_pos"), (300, 1)),
        "privileged.joint_vel": np.full((300, joints), 0.5) * h1_2.array("vel_limit"),
        "privileged.joint_effort": np.full((300, joints), -0.25) * h1_2.array("effort_limit"),
        "privileged.base_pos": np.stack([0.5 * time, 0 * time, 0 * time + h1_2.spawn_height], axis=1),
        "privileged.base_quat": np.tile([1.0, 0, 0, 0], (300, 1)),
        "privileged.base_lin_vel": np.tile([0.5, 0.0, 0.0], (300, 1)),
        "privileged.base_ang_vel": np.zeros((300, 3)),
        "privileged.foot_pos": foot_pos,
        "privileged.foot_force": np.where(swings[:, :, None], 0.0, [[[0.0, 0.0, 330.0]]]),
    }
    targets = np.tile(h1_2.array("default_pos"), (300, 1))
    return Recording(spec=h1_2, policy="ab" * 32, dt=DT, signals=signals, targets=targets, phase=phase, period=PERIOD)


def short_of(walk: Recording, rows: int) -> Recording:
    signals = {k: v[:rows] for k, v in walk.signals.items()}
    return replace(walk, targets=walk.targets[:rows], phase=walk.phase[:rows], signals=signals)


class Page(HTMLParser):
    """What a page shows, and where it takes pictures, scripts and the like from."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.sources, self.open = "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.sources += [v for k, v in attributes if k in ("src", "href", "data", "poster", "srcset")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data + " "


def page_of(*args, **kwargs) -> Page:
    return Page(write_report(*args, **kwargs).read_text())


# the page


@pytest.mark.usefixtures("drawing")
def test_the_page_needs_nothing_else(hold, walk, tmp_path):
    page = page_of(hold, tmp_path / "new" / "report.html", recording=short_of(walk, 20))
    assert page.open == []
    assert [s[:15] for s in page.sources if s.startswith("data:video/mp4;")] == ["data:video/mp4;"]
    assert len([s for s in page.sources if s.startswith("data:image/png;")]) == 4
    assert all(s.startswith("data:") for s in page.sources)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["report.html"]


@pytest.mark.usefixtures("drawing")
def test_the_page_shows_scores_against_targets(hold, walk, tmp_path):
    out = tmp_path / "report.html"
    page = page_of(hold, out, recording=walk, video=False, evaluation=EVALUATION, perturbed={"mass_x1.1": EVALUATION})
    shown = " ".join(page.text.split())
    assert "2 of 3 targets reached" in shown
    assert "0.250 ±0.050 target ≤ 0.1" in shown
    assert "torque_hits [%] 1.250" in shown
    assert "200 episodes of 20.0 s, seed 7" in shown
    assert "mass_x1.1 1.000 · 0.250 1.000 · 0.004" in shown
    assert re.findall(r"<td class=(\w+)>([\d.]+)", out.read_text()) == [
        ("good", "1.000"),
        ("bad", "0.250"),
        ("good", "0.004"),
    ]


@pytest.mark.usefixtures("drawing")
def test_the_page_shows_the_scores_in_the_contract(make_policy, walk, tmp_path):
    path = make_policy()
    before = page_of(path, tmp_path / "a.html", recording=walk, video=False)
    assert "not evaluated yet" in before.text
    score_policy(path, EVALUATION)
    after = page_of(path, tmp_path / "b.html", recording=walk, video=False)
    assert "2 of 3 targets reached" in after.text


@pytest.mark.usefixtures("drawing")
@pytest.mark.parametrize(
    "scores", [{"note": "good"}, {"easy": {"survival": None}}, {"easy": {"survival": 1}, "robustness": 3}]
)
def test_scores_of_other_shapes_do_no_harm(make_policy, walk, tmp_path, scores):
    path = make_policy(evaluation=scores)
    assert "The walk" in page_of(path, tmp_path / "report.html", recording=walk, video=False).text


@pytest.mark.usefixtures("drawing")
def test_the_page_says_what_the_policy_is(hold, walk, tmp_path):
    shown = page_of(hold, tmp_path / "report.html", recording=walk, video=False, title="<b>Mine</b>").text
    contract = read_contract(hold)
    assert all(x in shown for x in (contract.robot, contract.model_hash[:12], contract.training.date, walk.policy))
    assert "left_hip_yaw_joint" in shown  # the whole contract
    assert "<b>Mine</b>" in shown  # escaped, so shown as it is


@pytest.mark.usefixtures("drawing")
def test_the_page_shows_a_log(hold, walk, tmp_path):
    save_log(walk, tmp_path / "walk_log")
    page = page_of(hold, tmp_path / "report.html", recording=walk, video=False, log=tmp_path / "walk_log")
    assert "Recorded log walk_log" in page.text
    assert "/joint_states" in page.text
    assert "50 Hz" in page.text


@pytest.mark.usefixtures("drawing")
def test_the_command_writes_the_page_of_a_policy_that_falls(hold, tmp_path):
    console = Console(record=True, width=400)
    assert run_report(ReportConfig(policy=hold, out=tmp_path / "report.html", video=False), console) == 0
    assert str(tmp_path / "report.html") in console.export_text()
    assert "fell after" in Page((tmp_path / "report.html").read_text()).text


@pytest.mark.usefixtures("drawing")
def test_a_page_that_cannot_be_written_is_an_error(hold, walk, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_report(hold, tmp_path / "file" / "report.html", recording=walk, video=False)


# learning curves


def write_curves(run: Path, curves: dict[str, list[tuple[int, float]]]) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(run)) as writer:
        for tag, points in curves.items():
            for step, value in points:
                writer.add_scalar(tag, value, step)


def test_curves_are_read_as_they_were_written(tmp_path):
    points = [(1000 * k, 0.5 * k) for k in range(20_000 // 10)]  # more than TensorBoard keeps by default
    write_curves(tmp_path, {"episode/return": points, "loss/value": points[:3]})
    curves = read_curves(tmp_path)
    assert set(curves) == {"episode/return", "loss/value"}
    np.testing.assert_array_equal(np.transpose(curves["episode/return"]), points)


def test_a_folder_without_curves_has_none(tmp_path):
    assert read_curves(tmp_path) == {}


def test_without_tensorboard_the_error_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        read_curves(tmp_path)


@pytest.mark.usefixtures("drawing")
def test_the_page_of_a_run_shows_its_curves(hold, walk, tmp_path):
    (tmp_path / "policy.onnx").write_bytes(hold.read_bytes())
    bare = page_of(tmp_path, tmp_path / "a.html", recording=walk, video=False)
    assert "No TensorBoard curves" in bare.text
    write_curves(tmp_path, {"episode/return": [(0, 0.0), (10, 1.0)]})
    page = page_of(tmp_path, tmp_path / "b.html", recording=walk, video=False)
    assert len(page.sources) == len(bare.sources) + 1


def test_known_curves_are_drawn_or_else_the_first_ones():
    line = (np.arange(3), np.arange(3.0))

    def titles(curves):
        return [a.get_title(loc="left") for a in curves_figure(curves).axes if a.get_visible()]

    assert titles({"episode/return": line, "loss/value": line}) == ["return of an episode"]
    assert titles({f"x/{i}": line for i in range(10)}) == [f"x/{i}" for i in range(8)]


# figures


def test_an_average_over_a_cycle_hides_what_repeats_in_it():
    time = np.arange(200) * DT
    swayed = moving_average(3.0 + np.sin(2 * np.pi * time / PERIOD), 40)
    np.testing.assert_allclose(swayed[20:-20], 3.0, atol=1e-12)
    np.testing.assert_allclose(moving_average(np.full(10, 2.0), 40), 2.0)


def test_the_velocity_plot_shows_command_and_motion(walk):
    panels = velocity_figure(replace(walk, fell_at=5.0, push_at=(2.0,))).axes
    assert [a.get_ylabel() for a in panels] == ["forward [m/s]", "left [m/s]", "turn left [rad/s]"]
    _, average, command, push, fall = panels[0].lines
    np.testing.assert_allclose(average.get_ydata(), 0.5)
    np.testing.assert_array_equal(command.get_ydata(), walk.signals["command"][:, 0])
    assert (push.get_xdata()[0], fall.get_xdata()[0]) == (2.0, 5.0)


def test_a_foot_stands_where_the_ground_carries_it():
    force = np.array([[[0.0, 0.0, 4.0], [3.0, 0.0, 5.0]]])
    assert contacts(force).tolist() == [[False, True]]


def test_the_gait_diagram_begins_with_the_walk_and_has_a_bar_per_stance(walk):
    rows = gait_rows(walk)
    assert (rows.start, rows.stop) == (75, 275)
    bars, heights = gait_figure(walk).axes
    left, right = ([path.vertices[:, 0].min() for path in collection.get_paths()] for collection in bars.collections)
    stands = ~(walk.phase[rows] > 0.5)
    begins = walk.time[rows][np.flatnonzero(stands & ~np.concatenate([[False], stands[:-1]]))]
    np.testing.assert_allclose(left, begins)
    assert len(right) in (len(left), len(left) + 1)
    assert max(heights.lines[0].get_ydata()) == pytest.approx(8.0)


def test_a_short_recording_is_shown_whole(walk):
    short = short_of(walk, 50)
    assert (gait_rows(short).start, gait_rows(short).stop) == (0, 50)


def test_loads_are_shares_of_the_limits(walk):
    effort, speed = load_figure(walk).axes
    np.testing.assert_allclose([bar.get_width() for bar in effort.patches], 0.25)
    np.testing.assert_allclose([bar.get_width() for bar in speed.patches], 0.5)
    assert next(t.get_text() for t in effort.get_yticklabels()) == "left_hip_yaw"
