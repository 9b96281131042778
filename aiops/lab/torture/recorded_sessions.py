"""Record what honest peers say to servers, message by message, to be said again with changes."""

from __future__ import annotations

from typing import NamedTuple

from aiops.lab.torture.frame_templates import FrameTemplate
from aiops.lab.torture.message_line import CutFrames, MessageLine, PassedConnection


class RecordedFrame(NamedTuple):
    """One message that was said.

    Attributes
    ----------
    door
        The name of the server that it was said to.
    connection
        The number of its connection.
    frame
        The message.
    """

    door: str
    connection: int
    frame: FrameTemplate


class SessionRecorder(MessageLine):
    """Passes connections on to servers, and keeps what their clients say.

    Attributes
    ----------
    frames
        All messages so far, in the order in which they were whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[RecordedFrame] = []
        self._cut = dict[int, CutFrames]()

    def said(self, connection: PassedConnection, data: bytes) -> None:
        """Keep what a client says, and pass it on."""
        cut = self._cut.setdefault(connection.number, CutFrames())
        for _raw, frame in cut.add(data):
            self.frames.append(RecordedFrame(connection.door, connection.number, frame))
        connection.to_server(data)
