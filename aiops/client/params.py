"""The parameters as a client holds them: in arrays of its own, or in the server's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from aiops.model.arena import Arena
from aiops.model.layout import Array, Ints, Layout, level_of
from aiops.model.parts import Wants
from aiops.wire.shared_payloads import LentPayload

_NONE: Ints = np.empty(0, np.int64)


class Stamped(Protocol):
    """The versions of the tensors at which a gradient was computed."""

    @property
    def layout(self) -> Layout:
        """The tensors."""

    @property
    def versions(self) -> Ints:
        """Their versions, in arena order."""

    @property
    def newest(self) -> int:
        """The highest version of the model that any of them is of; -1 if none is known."""

    @property
    def connection(self) -> tuple[str, int]:
        """The client's id and the epoch of the connection that they came by."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Versions alone, without the parameters; a `Stamped`."""

    layout: Layout
    versions: Ints
    newest: int
    connection: tuple[str, int]

    @classmethod
    def of(cls, params: Stamped) -> Stamp:
        """Return what some parameters are stamped with now."""
        return cls(params.layout, params.versions.copy(), params.newest, params.connection)

    def copy(self) -> Stamp:
        """Return an independent copy."""
        return Stamp.of(self)

    def state(self) -> list[Any]:
        """Return the versions as plain values, for `from_state`."""
        return [self.versions.copy(), self.newest, list(self.connection)]

    @classmethod
    def from_state(cls, state: Sequence[Any], layout: Layout) -> Stamp:
        """Return the stamp of which `state` returned this."""
        versions, newest, (client, epoch) = state
        return cls(layout, _of_each(versions, layout), newest, (client, epoch))

    def older(self, other: Stamped) -> Stamp:
        """Return the older of both versions of each tensor."""
        versions = np.minimum(self.versions, other.versions)
        newest = max(self.newest, other.newest)
        return Stamp(self.layout, versions, newest, min(self.connection, other.connection))

    def renewed(self, other: Stamped, tensors: Sequence[int]) -> Stamp:
        """Return it with some tensors' versions as another has them."""
        versions = self.versions.copy()
        versions[list(tensors)] = other.versions[list(tensors)]
        return Stamp(self.layout, versions, max(self.newest, other.newest), other.connection)


class Params(Mapping[str, Array]):
    """A client's own copy of a model: a mapping from names to arrays, all in one flat arena.

    The arrays stay the same objects; a fetch or an exchange fills them with the new values.

    Attributes
    ----------
    version
        The model version held: of the tensors that are furthest behind, if they were not all
        fetched together. -1 when nothing has been fetched yet, or a fetch was cut midway (an array
        may then mix two versions, and the next fetch brings it again).
    held
        int64, one per tensor in arena order: the same for each tensor.
    versions
        int64, one per tensor: how many updates each tensor has seen.
    level, age
        The one value of ``held``, and that of ``versions``, from a fetch of the whole model until
        the array is read; None after that. (Reading makes the array, which may be written to.) A
        fetch that leaves all tensors at one version finds it again.
    """

    connection: tuple[str, int]

    # Those that compiled code reads and writes: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "age", "arena", "connection", "layout", "level")

    def __init__(self, layout: Layout, arena: Arena | None = None) -> None:
        self.layout: Layout = layout
        self.arena: Arena = arena or Arena(layout)
        self._version = -1  # of a model without tensors
        self.level: int | None = -1
        self.age: int | None = 0
        self._held: Ints = _NONE
        self._versions: Ints = _NONE
        self.connection = ("", 0)  # client id and epoch by which they came

    @property
    def held(self) -> Ints:
        """The model version held of each tensor."""
        if self.level is not None:
            self._held = np.full(len(self.layout.tensors), self.level, np.int64)
            self.level = None
        return self._held

    @held.setter
    def held(self, held: Ints) -> None:
        self._held, self.level = held, None

    @property
    def versions(self) -> Ints:
        """int64, one per tensor in arena order: the updates that each has seen."""
        if self.age is not None:
            self._versions = np.full(len(self.layout.tensors), self.age, np.int64)
            self.age = None
        return self._versions

    @versions.setter
    def versions(self, versions: Ints) -> None:
        self._versions, self.age = versions, None

    @property
    def newest(self) -> int:
        """The model version of the tensors that are furthest ahead."""
        if self.level is not None:
            return self.level
        return int(self._held.max()) if len(self._held) else self._version

    @property
    def version(self) -> int:
        """The model version held."""
        if self.level is not None:
            return self.level
        return int(self._held.min()) if len(self._held) else self._version

    @version.setter
    def version(self, version: int) -> None:
        self.now_at(version)

    def now_at(self, version: int, wants: Wants = (), late: Sequence[int] = ()) -> None:
        """Take note that some tensors (without ``wants``: all) are those of a model version.

        ``late``: except these, which stay what they are.
        """
        self._version = version
        if not wants and not late:  # the usual case
            self.level = version
            return
        held = self.held
        kept = [int(held[index]) for index in late]
        if not wants:
            held[:] = version
        for first, last, _have in wants:
            held[first:last] = version
        held[list(late)] = kept

    def find_age(self) -> None:
        """Have `age` be the version of all tensors with elements, if that is one.

        The others then have that version as well. An array that was read is another one from here.
        """
        if self.age is None:
            self.age = level_of(self._versions[self.layout.sizes > 0])

    def lend(self, lent: LentPayload) -> bool:
        """Be offered a whole version as it lies, instead of a copy; return whether it is taken.

        These arrays stay the same, so it is not.
        """
        return False

    def own(self) -> Arena:
        """Return the arena, to be written to."""
        return self.arena

    def __getitem__(self, name: str) -> Array:
        return self.arena.views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arena.views)

    def __len__(self) -> int:
        return len(self.layout.tensors)

    def __repr__(self) -> str:
        tensors = ", ".join(f"{t.name}: {t.dtype.name}{list(t.shape)}" for t in self.layout.tensors)
        return f"<Params version {self.version}: {tensors}>"

    def like(self) -> Params:
        """Return arrays of the same names, shapes and dtypes, all zero: room for gradients.

        A gradient written into these is sent as one payload straight from the arena.
        """
        other = Params(self.layout)
        other.arena.data[:] = 0
        return other

    def copy(self) -> Params:
        """Return an independent copy, of the same version."""
        other = Params(self.layout)
        other.arena.data[:] = self.arena.data
        other._version, other.level, other.age = self._version, self.level, self.age
        other._held, other._versions = self._held.copy(), self._versions.copy()
        other.connection = self.connection
        return other

    def numpy(self) -> dict[str, npt.NDArray[Any]]:
        """Return an independent plain dict of arrays."""
        return {name: array.copy() for name, array in self.items()}

    def state(self) -> list[Any]:
        """Return the versions as plain values, for `restore`; the arrays are not in them."""
        held = None if self.level is not None else self._held.copy()
        each = None if self.age is not None else self._versions.copy()
        return [self._version, self.level, held, self.age, each, list(self.connection)]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue with the versions that `state` returned."""
        self._version, self.level, held, self.age, each, (client, epoch) = state
        self._held = _NONE if held is None else _of_each(held, self.layout)
        self._versions = _NONE if each is None else _of_each(each, self.layout)
        self.connection = (client, epoch)


MakeRoom: TypeAlias = Callable[[], Params | None]
"""Returns room for a gradient, if there is any."""


class Leased(Params):
    """Parameters that are read in the server's memory, or copied where that cannot be.

    The arrays are read-only, and others after each fetch. A version is copied when it must be
    written to: when a fetch brings parts of the model, or the connection cannot lend.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._give_back: Callable[[], object] | None = None

    @property
    def borrowed(self) -> bool:
        """True while the arrays are the server's."""
        return self._give_back is not None

    @property
    def lender(self) -> object:
        """The object to whose method the arrays are given back; None: they are not
        borrowed, or by a mailbox.
        """
        return getattr(self._give_back, "__self__", None)

    def lend(self, lent: LentPayload) -> bool:
        """Read this version from here on."""
        self.read(lent.arena(self.layout), lent.give_back)
        return True

    def read(self, arena: Arena, give_back: Callable[[], object]) -> None:
        """Read a version in the server's arena, and call ``give_back`` when it is not needed."""
        self.release()
        self.arena, self._give_back = arena, give_back

    def keep(self, arena: Arena) -> None:
        """Have these parameters from here on, in an arena of its own."""
        self.release()
        self.arena = arena

    def own(self) -> Arena:
        """Return an arena of its own, with what was read until now."""
        if self._give_back is not None:
            mine = Arena(self.layout)
            mine.data[:] = self.arena.data
            self.release()
            self.arena: Arena = mine
        return self.arena

    def release(self) -> None:
        """End the hold on the server's version; the arrays mean nothing then."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def __getitem__(self, name: str) -> Array:
        return self.arena.shown[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arena.shown)


def _of_each(versions: Ints, layout: Layout) -> Ints:
    """Return a copy of kept versions, one per tensor of a layout."""
    if versions.shape != (len(layout.tensors),):
        raise ValueError(f"versions of shape {versions.shape} for {len(layout.tensors)} tensors")
    return versions.astype(np.int64)
