"""The peer `policy`, without the settings that make every step a push."""

from benchmarks.peers import ours, policy
from benchmarks.peers.policy import ENVIRONMENT, SETTINGS, Worker, missing

__all__ = ["ENVIRONMENT", "SETTINGS", "Server", "Worker", "missing"]


class Server(policy.Server):
    def flags(self):
        return ours.Server.flags(self)
