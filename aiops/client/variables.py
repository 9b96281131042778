"""The environment's variables that a client reads where it is given nothing else.

``aiops run`` sets them for the workers that it starts.
"""

from __future__ import annotations

import os

from aiops.errors import UsageError

URL, NAME, TOKEN = "AIOPS_URL", "AIOPS_NAME", "AIOPS_TOKEN"


def server_url(given: str | None) -> str:
    """Return the server's URL.

    Raises
    ------
    UsageError
        When it is neither given nor in `URL`.
    """
    if given is not None and not isinstance(given, str):
        raise UsageError(
            f"the server's URL is a string, not {type(given).__name__}; to take it from {URL},"
            " give the parameters by name: Worker(params=...)"
        )
    found = given or os.environ.get(URL)
    if not found:
        raise UsageError(
            "no server is named: give its URL, start the program with `aiops run`, or set"
            f" {URL}=aiops://host:port"
        )
    return found
