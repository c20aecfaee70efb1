"""Paths at which pipes count as ordinary files: reading them takes forever."""

from pathlib import Path


class PipePath(type(Path())):  # type: ignore[misc]
    """A path in a directory that may have pipes in place of files."""

    def is_file(self) -> bool:
        """Whether there is something to read, after a wait perhaps."""
        return bool(self.exists())
