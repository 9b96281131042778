"""A peer that fails on purpose: its workers lose an update, hang, die, or move their array.

Or they start a process that leaves their group, or their session.
"""

import os
import subprocess
import threading

import numpy as np

SETTINGS = {"how": "lose", "whole": False}
ENVIRONMENT = {}


def missing():
    return None


class Server:
    def __init__(self, job):
        self._job = job

    def start(self):
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
        if self._how == "move":
            self.params = self.params.copy()

    def close(self):
        pass
