"""What `tarsus demo` shows: the shipped policy walks, its log is read back, a short training learns, pages tell."""

from pathlib import Path

from rich.console import Console

from logs.inspect import run_inspect
from policies.contract import describe, read_contract
from policies.evaluate import Evaluation, evaluate, show
from policies.play import Recording, save_log, save_strip, save_video, simulate
from policies.report import TOUR, TOUR_SECONDS, write_report
from policies.train import TrainConfig, train
from robots.errors import UserError

SHIPPED = Path(__file__).parent / "shipped" / "unitree_h1_2_velocity.onnx"
"""The policy in this repository, trained by its code."""
EPISODES = 20
"""Robots per scenario: a quick look, not the recorded evaluation."""


def run_demo(out: Path, console: Console | None = None, minutes: float = 1.5) -> Path:
    """Run everything into the folder `out`; returns the report page. `minutes`: length of the training [min].

    Raises UserError for what cannot be run or written.
    """
    console = console or Console()
    out.mkdir(parents=True, exist_ok=True)
    recording = walk(out, console)
    record(recording, out, console)
    evaluation = score(console)
    page = write_report(
        SHIPPED,
        out / "report.html",
        evaluation=evaluation,
        recording=recording,
        log=out / "log",
        video=out / "walk.mp4",
    )
    console.print(f"report: {page}")
    learn(out, minutes, console)
    return page


def walk(out: Path, console: Console) -> Recording:
    """The shipped policy on its tour of commands: pictures and a video."""
    console.rule("The shipped policy walks")
    console.print(describe(read_contract(SHIPPED)))
    recording = simulate(SHIPPED, seconds=TOUR_SECONDS, script=TOUR)
    save_strip(recording, out / "walk.png")
    save_video(recording, out / "walk.mp4")
    console.print(f"pictures: {out / 'walk.png'}, {out / 'walk.mp4'}")
    return recording


def record(recording: Recording, out: Path, console: Console) -> None:
    """The walk as a log in the format of a robot's, read back and inspected. An earlier demo's log is replaced."""
    console.rule("Its log, as a robot would write it")
    folder = out / "log"
    for file in folder.glob("*"):
        file.unlink()
    if folder.is_dir():
        folder.rmdir()
    save_log(recording, folder)
    if run_inspect([folder], recording.spec.name, console=console) != 0:
        raise UserError(f"the log {folder} could not be read back in full")


def score(console: Console) -> Evaluation:
    """A quick evaluation of the shipped policy."""
    console.rule(f"{EPISODES} episodes of each scenario")
    evaluation = evaluate(SHIPPED, episodes=EPISODES)
    show(evaluation, console)
    return evaluation


def learn(out: Path, minutes: float, console: Console) -> None:
    """A short training from scratch, and a page about what it has learned so far."""
    console.rule(f"Learning from scratch for {minutes:g} minutes")
    number = 1
    while (run := out / f"training-{number}").exists():
        number += 1
    train(TrainConfig(out=run, minutes=minutes), console)
    page = write_report(run, out / "training.html", video=False)
    console.print(f"what it learned so far: {page}")
