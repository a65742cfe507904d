"""Shipped as ``__main__.py`` at the root of the runtime tree: ``python -I -S <runtime tree> ...`` runs the agent.

Short, because a script is compiled anew at every start; the modules that it imports are read from byte code. They lie
in ``lib``, because the root is on the ranks' PYTHONPATH, where they would hide an orc that is installed.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, f"{sys.path[0]}/lib")
    if sys.argv[1:2] == ["environment"]:
        from orc.launchers.environments.build import main

        sys.exit(main(sys.argv[2:]))
    from orc.launchers.agent.__main__ import run

    sys.exit(run(sys.argv[1:]))
