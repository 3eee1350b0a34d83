"""A recording as one zip file: packed for a download, unpacked from an upload without trusting it."""

import io
import re
import shutil
import tempfile
import weakref
import zipfile
from pathlib import Path

from traces.recording import TABLES, Recording, RecordingError

MOST_BYTES = 1_000_000_000  # unpacked
_NAME = re.compile(r"(?:[^/\\.][^/\\]*/)?(manifest\.json|(?:" + "|".join(TABLES) + r")/\d{5}\.parquet)")


class Unpacked:
    """A folder for one session's uploads; it goes when nobody holds this any more, at the latest with the process."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="zlab-upload-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)


def pack(folder: Path) -> bytes:
    """The recording's files, stored as they are (Parquet is compressed already)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        recording = Recording(folder)
        archive.write(folder / "manifest.json", "manifest.json")
        for table in TABLES:
            for part in recording.parts(table):
                archive.write(part, f"{table}/{part.name}")
    return buffer.getvalue()


def unpack(data: bytes, folder: Path) -> Path:
    """Put an uploaded recording into a new folder and return it.

    Only a recording's own file names are taken, at most MOST_BYTES in all. Raises RecordingError with what is wrong;
    the folder may then hold some of the files.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except zipfile.BadZipFile as error:
        raise RecordingError(f"the file is no zip file: {error}") from error
    with archive:
        entries = [(info, _NAME.fullmatch(info.filename)) for info in archive.infolist() if not info.is_dir()]
        odd = [info.filename for info, name in entries if name is None]
        if odd:
            raise RecordingError(f"{odd[0]!r} is no file of a recording (manifest.json, steps/00000.parquet, ...)")
        total = sum(info.file_size for info, _ in entries)
        if total > MOST_BYTES:
            raise RecordingError(f"unpacked it would be {total / 1e6:,.0f} MB, at most {MOST_BYTES / 1e6:,.0f} MB")
        for info, name in entries:
            assert name is not None
            target = folder / name.group(1)
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as source:
                content = source.read(info.file_size + 1)
            if len(content) != info.file_size:
                raise RecordingError(f"{info.filename}: is not as long as the zip file says")
            target.write_bytes(content)
    Recording(folder)
    return folder
