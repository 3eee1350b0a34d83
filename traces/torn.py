"""A file of lines whose writer was killed: the last line may be half there."""

from pathlib import Path


class TornLineWarning(UserWarning):
    """The last line of a file was left out: whoever wrote it was stopped in the middle."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        super().__init__(f"{path}: its last line ends after {num_bytes} bytes, the writer was stopped there: left out")
