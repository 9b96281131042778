"""End the processes of a job whose command was killed: ``python -m aiops.launch.reaper``.

A process that is killed outright cannot end its children. So the command starts this process, whose
standard input is a pipe that only the command writes to. However the command ends, the system
closes the pipe; then what is left of the job is killed: the processes whose environment has the
job's mark, also those that workers have started, and the sessions of those that are named in lines
of the pipe, where the system shows no environments.
"""

from __future__ import annotations

import os
import signal
import sys

from aiops.common.variables import JOB
from aiops.net.process_tree import having, kill_session, send


def main() -> None:
    """Wait for the end of standard input, then kill what is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the command's business
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job, sessions = os.environ[JOB], set[int]()
    for line in sys.stdin:
        what, number = line.split()
        (sessions.add if what == "begun" else sessions.discard)(int(number))
    for leader in sessions:
        kill_session(leader)
    while left := [pid for pid in having(f"{JOB}={job}") if pid != os.getpid()]:
        for pid in left:  # some may be starting others
            send(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
