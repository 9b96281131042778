"""Work that PyTorch does on a CUDA device, captured once and started with one call after that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch as _torch

_log = logging.getLogger("aiops.client")

Work: TypeAlias = Callable[[], Sequence[Any]]
"""Returns tensors; the same operations on the same memory each time."""


class Graphs:
    """The graphs of one device, which run one after the other and share what is temporary.

    They are captured on a stream of their own: PyTorch's for that is of the device that captured
    first.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        with _torch.cuda.device(device):
            self._stream, self._pool = _torch.cuda.Stream(device), _torch.cuda.graph_pool_handle()

    def captured(self, work: Work) -> tuple[Callable[[], None], Sequence[Any]] | None:
        """Capture some work; return what does it again, and the tensors in which its results are.

        Returns None when it cannot be captured: when there is no memory for it, say, or another
        thread captures. Nothing has changed then.
        """
        graph, before = _torch.cuda.CUDAGraph(), _torch.cuda.current_stream(self._device)
        try:
            with _torch.cuda.device(self._device):
                self._stream.wait_stream(before)
                with _torch.cuda.stream(self._stream):
                    work()  # libraries make ready what they have for each thread and stream
                # Other threads may go on to use the device.
                with _torch.cuda.graph(
                    *(graph, self._pool, self._stream), capture_error_mode="thread_local"
                ):
                    results = work()
        except RuntimeError as error:
            _torch.cuda.set_stream(before)  # which a capture that fails does not
            _log.info("work on %s is not captured, and takes longer: %s", self._device, error)
            return None
        return graph.replay, results
