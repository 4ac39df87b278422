"""The demo end to end, with a training of a few seconds."""

import io

from rich.console import Console

from policies import demo


def test_the_demo_walks_records_scores_and_learns(tmp_path, monkeypatch, drawing):
    monkeypatch.setattr(demo, "EPISODES", 1)
    monkeypatch.setattr(demo, "TOUR_SECONDS", 2.0)
    text = io.StringIO()
    page = demo.run_demo(tmp_path, Console(file=text, width=200), minutes=0.02)
    assert page == tmp_path / "report.html"
    made = {p.name for p in tmp_path.iterdir()}
    assert {"walk.png", "walk.mp4", "log", "report.html", "training-1", "training.html"} <= made
    assert (tmp_path / "training-1" / "policy.onnx").is_file()
    demo.record(demo.walk(tmp_path, Console(file=text)), tmp_path, Console(file=text))  # again: the old log makes room
    assert "/joint_states" in text.getvalue()
