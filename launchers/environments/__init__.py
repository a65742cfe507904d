"""Where the ranks' Python comes from: a virtual environment, conda, a copy of one, a container.

`rendering` says in ``agent.json`` what is wanted, `packing` brings along what only the submitting machine has, `node`
(shipped as ``orc_environment.py``) makes it true on each node, and `container` (``orc_container.py``) writes the
command lines of container runtimes. docs/how-to/environments.md.
"""
