"""Which code decides: a digest of this package as it stands."""

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

ENDINGS = (".py", ".toml")


@cache
def code_digest() -> str:
    """SHA-256 over the name and content of every module and preset of `policies`, the same on any machine.

    Line ends of Windows count as those of Unix. Taken once a process: it is of the code that runs.
    """
    digest = hashlib.sha256(b"policies/1\n")
    for name, item in sorted(_sources("", files("policies"))):
        content = item.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _sources(place: str, folder: Traversable) -> Iterator[tuple[str, Traversable]]:
    """Path below the package, and what stands there."""
    for item in folder.iterdir():
        name = f"{place}{item.name}"
        if item.is_dir():
            yield from _sources(f"{name}/", item)
        elif name.endswith(ENDINGS):
            yield name, item
