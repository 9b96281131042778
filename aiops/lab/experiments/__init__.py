"""Experiments: ``aiops bandwidth`` over TCP, and ``aiops experiment``, the papers' figures by name.

``aiops experiment`` consists of

======================  ===========================================================================
`experiment`, `papers`  the declaration of an experiment, and those that there are; `catalog` finds
                        them by name
`planned_run`, `runs`   one run and its key; finished runs, and the folder that keeps them
`execution`             the simulations that a run consists of, in turns; `cluster_simulation`
                        has those in virtual time
`scheduler`,            run what is missing, in processes; `run_planning` checks the runs first and
`run_pool`              estimates their time and memory
`report`                writes curves, summary and figure
======================  ===========================================================================
"""
