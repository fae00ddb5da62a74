"""Structured logs: one JSON object a line, on standard error unless told otherwise.

    {"time": "2026-12-01T09:30:00.123Z", "level": "info", "event": "request", "status": 200, ...}

No line holds text of a prompt or an answer, or a key.

What it does not do: decide what is worth a line.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, TextIO

__all__ = ["LOGGER", "JsonFormatter", "configure_logs", "log_event"]

LOGGER = logging.getLogger("mkref.serve")


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON; the fields of `log_event` become members."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": when.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.name != LOGGER.name:
            line["logger"] = record.name
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json.dumps(line, default=str)


def log_event(level: int, event: str, error: BaseException | None = None, **fields: Any) -> None:
    """One line about something that happened."""
    LOGGER.log(level, event, extra={"fields": fields}, exc_info=error)


def configure_logs(stream: TextIO | None = None, level: str = "info") -> logging.Handler:
    """Send the lines of the server, and uvicorn's, to a stream.

    Returns:
        The handler, so that it can be removed.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in (LOGGER.name, "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.setLevel(level.upper())
        logger.handlers = [handler] if name != "uvicorn.error" else []
        logger.propagate = name == "uvicorn.error"
    return handler
