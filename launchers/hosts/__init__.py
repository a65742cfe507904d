"""Checks of hosts before they are given work, and sessions on the nodes of running jobs.

`checks` gathers facts of each host and compares them, `ports` tries a connection for every pair, `all_reduce` runs a
small all-reduce over all of them, and `diagnostics` does all three. `probe` and `all_reduce_probe` run on the hosts:
sent as text, nothing is installed. All of it works over any `Transport`.
"""
