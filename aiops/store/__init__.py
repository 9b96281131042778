"""The parameters and how they change: snapshots and leases, updater, backends, tables."""
