"""Logs: written as rosbag2 MCAP, read from whatever robots and benches leave behind, and inspected.

Needs neither torch nor MuJoCo.
"""

from logs.data import Channel, Log, Topic
from logs.reader import open_log, read_images
from logs.topics import CameraModel, SignalSeries, read_signal
from logs.writer import LogWriter

__all__ = [
    "CameraModel",
    "Channel",
    "Log",
    "LogWriter",
    "SignalSeries",
    "Topic",
    "open_log",
    "read_images",
    "read_signal",
]
