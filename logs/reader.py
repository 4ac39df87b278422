"""Open a log of any kind that robots and benches leave behind, and read what can be read of it.

`open_log` never writes beside the log, never runs anything from it, and raises only if nothing at all can be read;
everything else that is wrong stands in `Log.problems`.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
import zstandard
from numpy.typing import NDArray

from logs import bags, tables, topics
from logs.bags import DAMAGE, Findings, RawMessage
from logs.data import Log, Topic
from logs.messages import Decoder, decode_all
from robots.errors import UserError

STORAGE: dict[str, Callable[[Path, Findings], Iterator[RawMessage]]] = {
    "mcap": bags.read_mcap,
    "sqlite3": bags.read_sqlite3,
}
SUFFIXES = {".mcap": "mcap", ".db3": "sqlite3", ".csv": "csv", ".tsv": "csv", ".txt": "csv", ".json": "json"}
MAGIC = ((bags.MCAP_MAGIC, "mcap"), (bags.SQLITE_MAGIC, "sqlite3"), (b"PAR1", "parquet"), (b"PK\x03\x04", "zip"))
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def open_log(path: Path) -> Log:
    """Read a rosbag2 directory, a bare .mcap or .db3, a CSV table or a JSON bench log.

    Files are recognised by their first bytes, then by their suffix. Raises UserError if nothing can be read.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"there is no log {path}")
    found = Findings()
    try:
        kind, topic_map = _read_directory(path, found) if path.is_dir() else _read_file(path, found)
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from error
    if not any(t.count for t in topic_map.values()):
        found.problems.append(f"{path.name} holds no messages")
    return Log(
        path=path,
        format=kind,
        topics=topic_map,
        problems=tuple(found.problems),
        notes=tuple(found.notes),
        info=found.info,
    )


def read_images(log: Log, topic: str) -> Iterator[tuple[int, NDArray[Any]]]:
    """Stamp [ns] and pixels of every image on a topic, one at a time: rgb (H, W, 3) uint8 or depth (H, W) [m].

    `open_log` keeps only the images' checksums, so the file is read once more. Raises UnknownNameError for another
    topic, UserError for a topic without images or an image that can't be decoded.
    """
    if log.topic(topic).msgtype != topics.IMAGE:
        raise UserError(f"{topic} of {log.path} carries {log.topic(topic).msgtype}, no images")
    found = Findings()
    decoder: Decoder | None = None
    with tempfile.TemporaryDirectory() as folder:
        for raw in _raw(log.path, Path(folder), found):
            if raw.topic.name == topic:
                decoder = decoder or Decoder(raw.topic)
                message = decoder.message(raw.data)
                stamp = message.header.stamp.sec * 10**9 + message.header.stamp.nanosec
                yield stamp or raw.receive_ns, topics.decode_image(message)


def _raw(path: Path, folder: Path, found: Findings) -> Iterator[RawMessage]:
    if path.is_dir():
        yield from _bag(path, found).messages(folder, found)
    else:
        yield from STORAGE[_kind(path)](path, found)


def _read_file(path: Path, found: Findings) -> tuple[str, dict[str, Topic]]:
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty")
    kind = _kind(path)
    if kind in STORAGE:
        return kind, decode_all(STORAGE[kind](path, found), found)
    if kind == "json":
        return kind, tables.read_json(path, found)
    if kind == "csv":
        return kind, tables.read_csv(path, found)
    raise UserError(f"{path} is a {kind} file, which is not read here: convert it to MCAP or CSV")


def _kind(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(ZSTD_MAGIC):
        return "zstd-compressed"
    for magic, kind in MAGIC:
        if start.startswith(magic):
            return kind
    if path.suffix.lower() in SUFFIXES:
        return SUFFIXES[path.suffix.lower()]
    return "json" if start.lstrip().startswith((b"{", b"[")) else "csv"


@dataclass(kw_only=True)
class _Bag:
    """A rosbag2 directory: its storage files and what its metadata promise."""

    path: Path
    files: list[Path]
    compressed: str = ""
    """"", "file" or "message"."""
    counts: dict[str, int] = field(default_factory=dict)
    """Messages each topic should have."""

    def messages(self, folder: Path, found: Findings) -> Iterator[RawMessage]:
        """Messages of all files, decompressed; unpacked files go to `folder`."""
        for file in self.files:
            try:
                plain = bags.unpack_zstd(file, folder, found) if file.suffix in (".zstd", ".zst") else file
                if not plain.stat().st_size:
                    raise UserError(f"{file.name} is empty")
                for raw in STORAGE[self.kind(plain)](plain, found):
                    yield self._unpacked(raw) if self.compressed == "message" else raw
            except (UserError, OSError, zstandard.ZstdError) as error:
                # One bad file of a split recording must not cost the others.
                found.problems.append(str(error))

    def kind(self, file: Path) -> str:
        """Storage of one of the files."""
        kind = _kind(file)
        if kind not in STORAGE:
            raise UserError(f"{file.name} is neither MCAP nor sqlite3 storage")
        return kind

    def _unpacked(self, raw: RawMessage) -> RawMessage:
        data = zstandard.ZstdDecompressor().decompressobj().decompress(raw.data)
        return RawMessage(topic=raw.topic, receive_ns=raw.receive_ns, data=data)


def _read_directory(path: Path, found: Findings) -> tuple[str, dict[str, Topic]]:
    bag = _bag(path, found)
    with tempfile.TemporaryDirectory() as folder:
        topic_map = decode_all(bag.messages(Path(folder), found), found)
    if not topic_map and found.problems:
        raise UserError(f"nothing of {path} can be read: {'; '.join(found.problems)}")
    for name, expected in bag.counts.items():
        have = sum(t.count for n, t in topic_map.items() if n == name or n.startswith((f"{name}#", f"{name} (")))
        if have != expected:
            found.problems.append(f"{name}: metadata.yaml promises {expected} messages, {have} could be read")
    storage = "sqlite3" if any(".db3" in f.name for f in bag.files) else "mcap"
    return f"rosbag2 {storage}", topic_map


def _bag(path: Path, found: Findings) -> _Bag:
    """The storage files of a directory, from its metadata or, without those, by suffix. Raises UserError."""
    present = sorted(p for p in path.iterdir() if SUFFIXES.get(_plain_suffix(p)) in STORAGE)
    metadata = _metadata(path, found)
    bag = _Bag(path=path, files=present)
    if metadata:
        names = [PurePosixPath(str(n)).name for n in metadata.get("relative_file_paths") or []]
        # Only files inside the directory: a path that leads out of it is not followed.
        bag.files = [path / n for n in names if (path / n).is_file()]
        for name in names:
            if not (path / name).is_file():
                found.problems.append(f"{name}, which metadata.yaml lists, is missing")
        bag.compressed = str(metadata.get("compression_mode") or "").lower()
        bag.counts = _promised(metadata)
        custom = metadata.get("custom_data") or {}
        found.info.update({str(k): str(v) for k, v in custom.items()} if isinstance(custom, dict) else {})
        extra = [p for p in present if p not in bag.files]
        if extra and not bag.files:
            bag.files = extra
        elif extra:
            found.notes.append(f"not listed in metadata.yaml and left out: {', '.join(p.name for p in extra)}")
    if not bag.files:
        raise UserError(f"{path} holds no .mcap or .db3 file: expected a rosbag2 directory")
    return bag


def _plain_suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".zstd").removesuffix(".zst")).suffix.lower()


def _metadata(path: Path, found: Findings) -> dict[str, Any]:
    file = path / "metadata.yaml"
    if not file.is_file():
        found.problems.append("metadata.yaml is missing: the recording was not completed, or the file was left behind")
        return {}
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8", errors="replace"))
        information = content["rosbag2_bagfile_information"]
        if not isinstance(information, dict):
            raise TypeError("no mapping")
    except DAMAGE as error:
        text = " ".join(str(error).split())[:120]
        found.problems.append(f"metadata.yaml can't be understood ({text}): the storage files are read without it")
        return {}
    return dict(information)


def _promised(metadata: dict[str, Any]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for entry in metadata.get("topics_with_message_count") or []:
        try:
            name = str(entry["topic_metadata"]["name"])
            counts[name] = counts.get(name, 0) + int(entry["message_count"])
        except (KeyError, TypeError, ValueError):
            continue  # an entry without name or count promises nothing
    return counts
