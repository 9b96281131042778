"""Log an error that comes again and again once a minute."""

from __future__ import annotations

import logging

_log = logging.getLogger("aiops.server")

_MINUTE = 60.0


class RepeatedError:
    """An error that comes again and again: it is logged at once, and then once a minute.

    Attributes
    ----------
    reason
        The last one's, until `over`; then it is empty.
    """

    def __init__(self) -> None:
        self.reason, self._said, self._unsaid = "", 0.0, 0

    def log(self, now: float, reason: str, text: str) -> None:
        """Log an error, unless that is to wait; another reason is logged at once.

        Parameters
        ----------
        now
            The time, in seconds.
        reason, text
            The error without what changes each time, and the sentence.
        """
        if reason == self.reason and now < self._said + _MINUTE:
            self._unsaid += 1
            return
        count = f" ({self._unsaid} more like the last one have not been logged)"
        _log.error("%s%s", text, count if self._unsaid else "")
        self.reason, self._said, self._unsaid = reason, now, 0

    def over(self) -> None:
        """Have the next one be logged at once: what failed has succeeded."""
        self.reason = ""
