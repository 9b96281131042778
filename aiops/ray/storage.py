"""Keep the checkpoints of a run where its ``RunConfig`` says: a folder, or a bucket.

pyarrow and Ray Train are imported when a checkpoint is: a worker that reports none starts sooner.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from aiops.errors import UsageError


@dataclass(frozen=True)
class Storage:
    """The folder of one run.

    Attributes
    ----------
    filesystem
        Of pyarrow.
    folder
        The path on it.
    """

    filesystem: Any
    folder: str

    @classmethod
    def of(cls, path: str, name: str, filesystem: Any = None) -> Storage:
        """Return that of a run.

        Parameters
        ----------
        path
            A path or URI (``s3://bucket/path``); with a filesystem, a path on that.
        name
            The run's.
        filesystem
            Of pyarrow; None: that of the URI, or the local one.

        Raises
        ------
        UsageError
            When it is neither.
        """
        import pyarrow.fs

        try:
            if filesystem is None and "://" in path:
                filesystem, path = pyarrow.fs.FileSystem.from_uri(path)
            elif filesystem is None:
                filesystem, path = pyarrow.fs.LocalFileSystem(), os.path.abspath(path)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UsageError(f"storage_path {path!r} cannot be used: {error}") from None
        return cls(filesystem, f"{path.rstrip('/')}/{name}")

    def put(self, checkpoint: Any, name: str) -> str:
        """Copy a checkpoint's files into this folder; return the path of the copy."""
        import pyarrow.fs

        path = f"{self.folder}/{name}"
        self.filesystem.create_dir(path, recursive=True)
        pyarrow.fs.copy_files(
            checkpoint.path,
            path,
            source_filesystem=checkpoint.filesystem,
            destination_filesystem=self.filesystem,
        )
        return path

    def checkpoint(self, path: str) -> Any:
        """Return the `ray.train.Checkpoint` at a path."""
        from ray.train import Checkpoint

        return Checkpoint(path, filesystem=self.filesystem)

    def delete(self, path: str) -> None:
        """Delete a checkpoint that is not kept."""
        self.filesystem.delete_dir(path)
