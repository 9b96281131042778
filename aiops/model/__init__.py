"""A model as a value: layout, arena, tables, placement, shared memory; no bytes on a wire."""
