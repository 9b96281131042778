"""Real data, the demo, a slow link, the papers' figures; in the package only cli imports it.

The benchmarks of the repository use its parts as well.

====================================  =============================================================
`workloads`                           data sets, mini-batches, and the perceptron that they train
`processes`, `piped_child`            child processes: started, read, and ended with their parent
`training_run`, `training_worker`,    a server and worker processes that train over TCP: both sides,
`training_files`                      and the data that they share
`slow_link`                           a TCP proxy with a stated rate and delay
`run_record`                          the record of a run as JSON: machine, versions, settings
`figures`, `drawing`, `figure_style`  a figure as a value, how it is drawn, and the style of all
`demo`, `experiments`                 ``aiops demo``, ``aiops bandwidth``, ``aiops experiment``
====================================  =============================================================

This module imports nothing, so that a child process starts quickly.
"""
