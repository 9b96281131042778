"""Refuse, at the start, the options that do not work with several shards."""

from __future__ import annotations

from aiops.engine.events import Options
from aiops.errors import ConflictError


def check_sharded(options: Options) -> None:
    """Refuse options that do not work with more than one shard.

    Raises
    ------
    ConflictError
        Its text names the option, the reason and a remedy.
    """
    why = next((text for is_so, text in _refused(options) if is_so), None)
    if why is not None:
        raise ConflictError(why)


def _refused(options: Options) -> list[tuple[bool, str]]:
    return [
        (
            bool(options.budget or options.worker_budget),
            "a bandwidth budget counts what one server sends, and several shards do not share one:"
            " run one server, or have workers send less by codecs (--push-codec, --fetch-codec) and"
            " a gate of fixed constants (--gate bfasgd:c_push=0.1,c_fetch=0.01)",
        ),
    ]
