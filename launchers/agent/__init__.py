"""The agent: starts, watches and ends the processes of one attempt on one node, and writes down how it went.

Standard library only, Python >= 3.9: the package travels to the nodes as ``lib/orc/launchers/agent``, in the runtime
tree, and runs there under any interpreter, with nothing installed. The attempt directory that it reads and writes is
described in docs/explanation/attempt-directory.md; why it is built like this is in docs/explanation/agent.md.
"""
