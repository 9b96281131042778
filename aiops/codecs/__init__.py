"""Ways of writing a tensor's bytes for the wire: one per file, named in a part's ``codec``."""

from __future__ import annotations

from aiops.codecs import raw

CODECS = {raw.NAME: raw}
"""The codecs that this package reads and writes, by name."""
