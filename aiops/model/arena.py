"""Hold a copy of a model in memory: one aligned run of bytes, viewed as tensors."""

from __future__ import annotations

import numpy as np

from aiops.model.layout import Array, Bytes, Layout


def aligned(nbytes: int, to: int = 64) -> Bytes:
    """Return uninitialised memory, uint8[nbytes], that begins at a multiple of ``to`` bytes."""
    raw = np.empty(nbytes + to - 1, np.uint8)
    skip = -raw.ctypes.data % to
    return raw[skip : skip + nbytes]


class Arena:
    """One copy of a model.

    Parameters
    ----------
    layout
        The model.
    data
        Its bytes, uint8[layout.nbytes]; by default uninitialised memory.
    segment
        The shared memory that begins with ``data``, if it is shared.

    Attributes
    ----------
    sections
        A flat typed view of each section of the layout.
    """

    segment: object | None

    __slots__ = ("__weakref__", "_shown", "_views", "data", "layout", "sections", "segment")

    def __init__(
        self, layout: Layout, data: Bytes | None = None, segment: object | None = None
    ) -> None:
        self.layout: Layout = layout
        self.segment = segment
        self.data: Bytes = aligned(layout.nbytes) if data is None else data
        self.sections: tuple[Array, ...] = tuple(
            self.data[section.start : section.stop].view(section.dtype)
            for section in layout.sections
        )
        self._views: dict[str, Array] | None = None
        self._shown: dict[str, Array] | None = None

    @property
    def shown(self) -> dict[str, Array]:
        """The tensors by name, as read-only shaped views of the arena."""
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
