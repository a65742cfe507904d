"""Shipped as ``__main__.py`` beside ``orc_agent.py``: ``python -I -S <runtime tree>`` runs the agent from byte code.

A script is compiled anew at every start, a module is not: that is half of the agent's start-up time.
"""

import sys

if __name__ == "__main__":
    import orc_agent  # type: ignore[import-not-found]  # beside this file on the nodes

    sys.exit(orc_agent.run(sys.argv[1:]))
