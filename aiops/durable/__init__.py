"""The journal of an engine, acknowledgements that wait for it, recovery from it; no files."""
