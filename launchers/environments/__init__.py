"""Environments, which the ranks' Python comes from: a virtual environment, conda, a copy of one, a container.

``agent.json`` says what is wanted, `packing` brings along what only the submitting machine has, `build` makes it true
on each node, and `container` writes the command lines of container runtimes; these two travel with the agent.
docs/how-to/environments.md.
"""
