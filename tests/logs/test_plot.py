from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from logs import open_log
from logs.inspect import inspect
from logs.plot import GAP_COLOUR, save_overview
from robots.errors import UserError


def picture(folder: Path, rows: np.ndarray, header: str = "time,position,velocity") -> np.ndarray:
    path = folder / "log.csv"
    path.write_text(header + "\n" + "".join(",".join(map(str, r)) + "\n" for r in rows))
    log = open_log(path)
    save_overview(log, inspect(log), folder / "page.png")
    return np.asarray(imread(folder / "page.png"))


def motion(count: int = 1000) -> np.ndarray:
    time = np.arange(count) * 0.01
    return np.stack([time, np.sin(time), np.cos(time)], axis=1)


def red_pixels(image: np.ndarray) -> int:
    """Pixels of the gap colour, blended with white."""
    return int(((image[..., 0] - image[..., 1] > 0.15) & (abs(image[..., 1] - image[..., 2]) < 0.1)).sum())


def test_every_channel_gets_a_strip(tmp_path: Path) -> None:
    two = picture(tmp_path, motion())
    one = picture(tmp_path, motion()[:, :2], header="time,position")
    assert two.shape[0] > one.shape[0]
    assert two.shape[1] == one.shape[1]
    assert GAP_COLOUR.startswith("#d6")


def test_gaps_are_marked_in_red(tmp_path: Path) -> None:
    assert red_pixels(picture(tmp_path, motion())) == 0
    assert red_pixels(picture(tmp_path, np.delete(motion(), np.s_[400:600], axis=0))) > 1000


def test_missing_values_and_tables_without_time_are_drawn(tmp_path: Path) -> None:
    rows = motion()
    rows[100:120, 1] = np.nan
    assert red_pixels(picture(tmp_path, rows)) > 0
    assert picture(tmp_path, motion()[:, 1:], header="position,velocity").size


def test_long_logs_keep_their_spikes(tmp_path: Path) -> None:
    rows = np.stack([np.arange(50_000) * 1e-3, np.zeros(50_000), np.zeros(50_000)], axis=1)
    rows[1::2, 1] = 1e-3
    flat = picture(tmp_path, rows)
    rows[31_415, 1] = 5.0
    assert not np.array_equal(picture(tmp_path, rows), flat)


def test_a_log_without_numbers_and_a_place_without_folder_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no numbers to draw"):
        picture(tmp_path, np.ones((5, 3)), header="a,b,c")
    log = open_log(tmp_path / "log.csv")
    (tmp_path / "log.csv").write_text("time,q\n0,1\n1,2\n")
    log = open_log(tmp_path / "log.csv")
    with pytest.raises(UserError, match="cannot save"):
        save_overview(log, inspect(log), tmp_path / "nowhere" / "page.png")
