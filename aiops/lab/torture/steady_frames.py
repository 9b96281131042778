"""Workers whose exchanges are steady, and frames among these of which one thing is changed.

Each connection says a push after the other in one form, with the numbers that are due: so the
server learns the form, and answers by its short way (`aiops.engine.steady`), in compiled code where
there is any. Frames come whole, in two pieces, or two at once.
"""

from __future__ import annotations

from random import Random

from aiops.errors import RemoteProtocolError
from aiops.lab.torture.attack_trial import AttackResult
from aiops.lab.torture.attacked import Door
from aiops.lab.torture.changed_frames import ChangedFrames
from aiops.lab.torture.fed_connection import FedConnection
from aiops.lab.torture.frame_templates import FrameTemplate, message_frame
from aiops.lab.torture.steady_pushes import PushForm, changed_push
from aiops.wire.decoding import decode
from aiops.wire.messages import PROTOCOL, Ack, Hello, Push
from aiops.wire.template import PREFIX

_BATCH = 1000  # frames, after which all connections end
_FORMS = 12  # of pushes
_CLIENTS = 64  # the statistics of a server that remembers many are slow
_SOME = 4  # pushes, of which one is taken if any can be


class SteadyWorker:
    """A worker on a connection.

    Parameters
    ----------
    connection
        On which it has said hello.
    form
        That of its pushes.
    client
        Its identity.

    Attributes
    ----------
    connection, form, client
        As above.
    id
        Of its last request.
    acknowledged
        Of its pushes, those that were.
    have, base
        The version that it has, and the updates that its tensors have had.
    """

    def __init__(self, connection: FedConnection, form: PushForm, client: str) -> None:
        self.connection, self.form, self.client = connection, form, client
        self.acknowledged = 0
        self.id, self.have, self.base = 0, 0, 0
        self._read = 0

    def listen(self) -> None:
        """Take in what the server has answered since."""
        said = self.connection.said
        for data in said[self._read :]:
            end = 5 + int.from_bytes(data[1:5], "big")
            if data[:1] != b"\xce" or end > len(data):
                continue
            try:
                message = decode(bytes(data[5:end]))
            except RemoteProtocolError:  # it was the middle of a payload
                continue
            if isinstance(message, Ack) and message.used:
                self.acknowledged += 1
                self.have = message.current
                self.base = min((part.version for part in message.parts), default=self.base)
        self._read = len(said)


class SteadyFrames(ChangedFrames):
    """Pushes of workers whose exchanges are steady, for one door of a server.

    Parameters
    ----------
    rng, result
        As of `ChangedFrames`.
    door
        Where they are sent.
    """

    def __init__(self, rng: Random, door: Door, result: AttackResult) -> None:
        assert door.accept is not None
        assert door.answered is not None
        self._accept, self._answered = door.accept, door.answered
        self._forms = [PushForm.drawn(rng, door.target) for _ in range(_FORMS)]
        self._epochs = {rng.randbytes(16).hex(): 0 for _ in range(_CLIENTS)}
        self._seq = 1 << 20
        super().__init__(rng, [form.template for form in self._forms], result)

    def send(self, together: int) -> None:
        """Send frames on some connections at once, and end these; three of ten are changed."""
        rng, result = self.rng, self.result
        workers = [self._connect() for _ in range(together)]
        end = result.frames + _BATCH
        while result.frames < end:
            at = rng.randrange(together)
            worker = workers[at]
            if worker.connection.over or worker.connection.paused:
                self._leave(worker)
                workers[at] = worker = self._connect()
            data = self._next(worker)
            lot = rng.randrange(16)
            if lot == 0:
                data += self._next(worker)
            elif lot < 3:
                cut = rng.randrange(len(data) + 1)
                worker.connection.feed(data[:cut])
                data = data[cut:]
            worker.connection.feed(data)
            worker.listen()
        for worker in workers:
            self._leave(worker)

    def _connect(self) -> SteadyWorker:
        """Make a connection, and say hello."""
        rng = self.rng
        connection = FedConnection(self._accept())
        self.result.sessions += 1
        client = rng.choice(list(self._epochs))
        self._epochs[client] = epoch = self._epochs[client] + 1
        nonce = rng.randbytes(16)
        hello = Hello(0, PROTOCOL, client, epoch, "w", "worker", False, nonce, "steady")
        connection.feed(message_frame(hello))
        return SteadyWorker(connection, rng.choice(self._forms), client)

    def _leave(self, worker: SteadyWorker) -> None:
        """End a connection; count what compiled code answered there.

        A client is another from here on if a changed number has made all that follow too old.
        """
        if worker.id > _SOME and not worker.acknowledged and worker.client in self._epochs:
            del self._epochs[worker.client]
            self._epochs[self.rng.randbytes(16).hex()] = 0
        before = self._answered()
        self.end(worker.connection)
        self.result.compiled += before - self._answered()

    def _next(self, worker: SteadyWorker) -> bytes:
        """Return a worker's next push, or one in which something is changed."""
        rng, form = self.rng, worker.form
        self._seq += 1
        worker.id += 1
        numbers = worker.id, self._seq, worker.have, worker.base
        frame = form.filled(numbers, rng.choice(form.gradients))
        if rng.random() < 0.3:
            data = changed_push(rng, form, frame)
            if data is None:
                return self._other(frame)
            if _is_partial(data, frame) and rng.random() < 0.98:
                data = frame.right
        else:
            data = frame.right
        self.result.frames += 1
        self.result.sent += len(data)
        return data

    def _other(self, frame: FrameTemplate) -> bytes:
        """Return a push in which a value of any length is changed, or which is cut."""
        data = self.changed(frame, self.rng.getrandbits(32))
        if data is None or (_is_partial(data, frame) and self.rng.random() < 0.98):
            return frame.right
        return data


def _is_partial(data: bytes, frame: FrameTemplate) -> bool:
    """Return whether these bytes are a push of a part of the model.

    After one that is taken no exchange is steady: tensors have had updates in different numbers.
    """
    end = PREFIX + int.from_bytes(data[1:PREFIX], "big")
    try:
        found = decode(data[PREFIX:end]) if end <= len(data) else None
    except RemoteProtocolError:
        return False
    right = decode(frame.header)
    assert isinstance(right, Push)
    return isinstance(found, Push) and _covered(found) != _covered(right)


def _covered(push: Push) -> list[tuple[int, int]]:
    return [part[:2] for part in push.parts]
