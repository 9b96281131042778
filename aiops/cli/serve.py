"""``aiops serve``, which is also ``python -m aiops.server``."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import typer

from aiops.cli import starting
from aiops.serving.config import Config, read_file

_SOURCES = ("DEFAULT_MAP", "ENVIRONMENT", "COMMANDLINE")  # as typer names them; the last wins


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    if path is not None:
        context.default_map = {**read_file(path), **(context.default_map or {})}
    return path


def _merge_settings(context: typer.Context, values: dict[str, Any]) -> None:
    """Merge the algorithm's settings of all sources; each source changes those that it names.

    ``lr`` is one of them: ``--set lr=...`` wins over a file's.
    """
    source = getattr(context.get_parameter_source("set"), "name", "")
    given: list[list[str]] = [
        (context.default_map or {}).get("set", []),
        os.environ.get("AIOPS_SET", "").split(),
        values["set"] if source == "COMMANDLINE" else [],
    ]
    source = getattr(context.get_parameter_source("lr"), "name", "")
    if source in _SOURCES:
        at = _SOURCES.index(source)
        if any(_is_rate(item) for items in given[at + 1 :] for item in items):
            values["lr"] = None
        given[:at] = [[item for item in items if not _is_rate(item)] for items in given[:at]]
    values["set"] = [item for items in given for item in items]


def _is_rate(item: str) -> bool:
    """Return whether a setting is the learning rate of all tensors."""
    key, equals, value = item.partition("=")
    return bool(equals) and key.strip() == "lr" and "@" not in value


def _policies(begun: str) -> list[str]:
    """Return the algorithms whose names begin so, for the shell to complete them."""
    from aiops.algorithms import BUILT_IN

    return [name for name in sorted(BUILT_IN) if name.startswith(begun)]


def _with_config_flags(function: Callable[[Config, str], None]) -> Callable[..., None]:
    """Make a command whose flags are the fields of `Config`, and ``--config``.

    The function gets the settings, and a line for the log that says why they are so; or none.
    """
    hints = get_type_hints(Config)
    lists = [f.name for f in dataclasses.fields(Config) if f.default is dataclasses.MISSING]

    def command(context: typer.Context, config: Path | None = None, **values: Any) -> None:
        for name in lists:
            values[name] = list(values[name] or [])
        _merge_settings(context, values)
        why = ""
        if values["shards"] == "auto":
            from aiops.net.cpu_count import usable
            from aiops.serving.shard_count import settle_shards

            values, why = settle_shards(values, usable())
        function(Config(**values), why)

    parameters = [
        inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Path | None,
            default=typer.Option(
                None,
                "--config",
                envvar="AIOPS_CONFIG",
                callback=_read_config,
                is_eager=True,
                help="A TOML file with any of these settings.",
            ),
        ),
    ]
    for field in dataclasses.fields(Config):
        flag = "--" + field.name.replace("_", "-")
        default = None if field.name in lists else field.default
        option = typer.Option(
            default,
            flag,
            envvar="AIOPS_" + field.name.upper(),
            help=field.metadata["help"],
            show_default=default is not None,
            parser=field.metadata["read"],
            autocompletion=_policies if field.name == "policy" else None,
        )
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=hints[field.name],
                default=option,
            )
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = function.__doc__
    command.__name__ = function.__name__
    return command


class _JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        row = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row)


def _log_to_stderr(config: Config) -> None:
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(_JsonLines() if config.log_format == "json" else text)
    logger = logging.getLogger("aiops")
    logger.addHandler(handler)
    logger.setLevel(config.log_level.upper())
    logging.captureWarnings(True)
    for other in ("asyncio", "py.warnings"):  # their records, in the same format
        logging.getLogger(other).addHandler(handler)


@_with_config_flags
def serve(config: Config, why: str) -> None:
    """Run a server. Its first line on stdout is the URL to join; logs go to stderr.

    Every flag is also an AIOPS_* variable and a key of --config FILE.toml. SIGTERM and Ctrl-C
    drain: answers are sent, the model is saved (--save), and the exit status is 0.
    """
    from aiops.net import signals
    from aiops.serving.main import check_files, run

    check_files()
    _log_to_stderr(config)
    logger = logging.getLogger("aiops.server")
    if why:
        logger.info("%s", why)
    try:
        import uvloop
    except ImportError:
        logger.info("uvloop is not installed; asyncio's own loop is slower: pip install uvloop")
        runner = asyncio.Runner()
    else:
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def announce(url: str) -> None:
        print(url, flush=True)
        starting.end()
        if config.standby is None:
            logger.info("serving %s at %s", config.policy, url)
        else:
            logger.info("standing by for %s at %s", config.standby, url)

    with runner:
        runner.run(run(config, announce))
        signals.ignore_further()
    logger.info("stopped")
