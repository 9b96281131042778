"""The server's state as bytes: plain values, blocks, journal frames, snapshot files, file names.

No file is opened here. Readers are handed bytes, or a function `read(offset, into)`; writers return
buffers and the offsets at which they belong. docs/state.md describes the format for readers in any
language; every length that is read is checked against what there is before it is used.

Dependencies among the modules, lowest first: ``plain`` (values as MessagePack) → ``blocks`` (one
checksummed value) → ``row_kinds`` (fields of a journal's rows), ``frames`` (segments of the
journal), ``snapshot_file``, ``directory`` (names of files, and which of them are needed).
"""
