"""``aiops torture``: kill servers and workers, real and simulated ones, and count what was lost.

::

    checker.py    what clients saw, against the model      plan.py      what a seed decides
    pusher.py     a worker process                         trial.py     one plan, carried out
    spawner.py    forks processes, tells how they ended    campaign.py  many trials, and the report

    server_group.py, lead_line.py       the servers of a trial, and what can be cut between two
    data_trial.py, data_reader.py       workers and servers killed in the middle of epochs
    cluster_plan.py, cluster_trial.py   the same of a simulated cluster, with more kinds of faults
    states.py                           moments of its disk, damaged, and read
    seed_campaign.py                    many of these, and the report
    attacked*.py, attack_variants.py    servers that hostile peers attack
    session_trial.py, frame_trial.py    by whole sessions in a network; by mutated frames
    line_trial.py, changed_line.py      by their partners: a follower, a primary
    hostile_neighbour.py                processes on a server's machine, over real Unix sockets
    hostile_lender.py                   lend wrong memory
    hostile_poster.py, mailbox_trial.py write in mailboxes while a server reads, on a
    posting_connection.py               connection that posts what it is told to
    partitions.py, routed_network.py    networks of namespaces that are parted again and again
    flipped_bits.py                     single bits of messages with checksums, and of files
    fuzz_targets.py, fuzzing.py         parsers, fuzzed with coverage

The checker knows no more than a client: its own acknowledgements, and the parameters that it may
fetch. Under an additive policy with learning rate 1, every push adds to a place of its own in a
float64 model, so the model tells how many times each was applied: an acknowledged push exactly
once, any other at most once.
"""
