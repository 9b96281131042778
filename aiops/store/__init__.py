"""The parameters and how they change: snapshots (versions, leases), updater, backends, sparse tables, delta replica."""
