"""A peer that fails on purpose: its workers lose an update, hang, die, or move their array.

Or they start a process that leaves their group, or their session. Or the server has one that works
for 0.2 s in the first cycle.
"""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

SETTINGS = {"how": "lose", "whole": False}
ENVIRONMENT = {}
PIPES = ("begin", "done")
_BURN = """
import sys, threading, time
open(sys.argv[1]).read()
begin = time.process_time()
while time.process_time() < begin + 0.2: pass
open(sys.argv[2], "w").close()
threading.Event().wait()
"""


def missing():
    return None


class Server:
    def __init__(self, job):
        self._job = job

    def start(self):
        if self._job.settings["how"] == "burn":
            pipes = [Path(tempfile.gettempdir(), name) for name in PIPES]
            for pipe in pipes:
                os.mkfifo(pipe)
            subprocess.Popen([sys.executable, "-c", _BURN, *pipes], start_new_session=True)
        return "nowhere"

    def parameters(self):
        return np.zeros(self._job.elements, np.float32)

    def close(self):
        pass


class Worker:
    def __init__(self, job, address, index):
        assert address == "nowhere"
        self._how = job.settings["how"]
        self._version = 0
        self.params = np.zeros(job.elements, np.float32)

    def cycle(self):
        self._version += 1
        self.params[:] = (1 + np.arange(self.params.size) % 7) * -(2.0**-10) * self._version
        if self._how == "hang":
            threading.Event().wait()
        if self._how == "die":
            print("the end", flush=True)
            os._exit(3)
        if self._how == "stray":
            subprocess.Popen(["sleep", "600"], process_group=0)
        if self._how == "shard":
            subprocess.Popen(["sleep", "600"], start_new_session=True)
        if self._how == "burn":
            begin, done = (Path(tempfile.gettempdir(), name) for name in PIPES)
            begin.write_text("")
            done.read_text()
        if self._how == "move":
            self.params = self.params.copy()

    def close(self):
        pass
