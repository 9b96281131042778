"""Copies of a model in memory: one aligned run of bytes each, seen as its tensors."""

from __future__ import annotations

import numpy as np

from aiops.model.layout import Array, Bytes, Layout


def aligned(nbytes: int) -> Bytes:
    """Return uninitialised bytes whose first is 64-byte aligned."""
    raw = np.empty(nbytes + 63, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + nbytes]


class Arena:
    """One copy of a model: its bytes, a flat typed view per section, a shaped view per tensor."""

    __slots__ = ("__weakref__", "_shown", "_views", "data", "layout", "sections", "segment")

    def __init__(
        self, layout: Layout, data: Bytes | None = None, segment: object | None = None
    ) -> None:
        self.layout = layout
        self.segment = segment  # the shared memory it lies in, from its first byte on
        self.data = aligned(layout.nbytes) if data is None else data
        self.sections: tuple[Array, ...] = tuple(
            self.data[section.start : section.stop].view(section.dtype)
            for section in layout.sections
        )
        self._views: dict[str, Array] | None = None
        self._shown: dict[str, Array] | None = None

    @property
    def shown(self) -> dict[str, Array]:
        """The same as `views`, read-only."""
        if self._shown is None:
            self._shown = {name: view.view() for name, view in self.views.items()}
            for view in self._shown.values():
                view.flags.writeable = False
        return self._shown

    @property
    def views(self) -> dict[str, Array]:
        """The tensors by name, as shaped views of the arena."""
        if self._views is None:
            self._views = {
                t.name: self.data[t.offset : t.offset + t.nbytes].view(t.dtype).reshape(t.shape)
                for t in self.layout.tensors
            }
        return self._views
