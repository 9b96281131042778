"""The files of a state directory: journal, snapshots, and the server's use of them."""
