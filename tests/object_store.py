"""A real S3 server on this machine, in a thread of this process (moto)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

KEYS = {
    "AWS_ACCESS_KEY_ID": "of-a-test",
    "AWS_SECRET_ACCESS_KEY": "of-a-test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""The variables that clients need."""


@dataclass
class ObjectStore:
    """A running S3 server with one bucket.

    Attributes
    ----------
    host_and_port
        Where it listens.
    """

    host_and_port: str

    def url(self, path: str) -> str:
        """Return the URL of a path in the bucket."""
        return f"s3://bucket/{path}?scheme=http&endpoint_override={self.host_and_port}"

    def files(self, path: str) -> Any:
        """Return a pyarrow file system, and the path in it."""
        import pyarrow.fs

        return pyarrow.fs.FileSystem.from_uri(self.url(path))

    def names(self, path: str) -> list[str]:
        """Return the names of the objects at a path, sorted."""
        import pyarrow.fs

        files, where = self.files(path)
        selector = pyarrow.fs.FileSelector(where, allow_not_found=True)
        return sorted(info.base_name for info in files.get_file_info(selector))


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Run a server; its data ends with it. `KEYS` are to be in the environment."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        store = ObjectStore("{}:{}".format(*server.get_host_and_port()))
        url = f"s3://?scheme=http&endpoint_override={store.host_and_port}"
        import pyarrow.fs

        pyarrow.fs.FileSystem.from_uri(f"{url}&allow_bucket_creation=true")[0].create_dir("bucket")
        yield store
    finally:
        server.stop()
