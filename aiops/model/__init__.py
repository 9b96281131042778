"""A model as a value: layout, arena, tables, placement on shards, shared memory; no bytes on a wire."""
