"""Completion of an attempt whose nodes are all on this machine."""

from __future__ import annotations

import os
import sys

from orc.launchers.agent.errors import log_stderr
from orc.launchers.agent.processes import users_umask
from orc.launchers.agent.procfs import identity
from orc.launchers.agent.records import create_json, remove
from orc.launchers.agent.signals import release_signals
from orc.launchers.agent.variables import without_own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from orc.launchers.agent.config import AgentConfig


def finish_gang(config: AgentConfig) -> None:
    """Remove the secrets and start ``on_exit``, once, when all nodes of a gang have ended."""
    attempt_dir = config.attempt_dir
    remove(os.path.join(attempt_dir, "secrets.json"))
    on_exit = config.on_exit
    if not on_exit or not create_json(os.path.join(attempt_dir, "finished.json"), identity()):
        return
    env = without_own(os.environ)
    env.update(on_exit.get("env") or {}, ORC_GANG=config.marker)
    sys.stderr.flush()
    if os.fork() == 0:
        try:
            os.setsid()
            release_signals()
            os.umask(users_umask())
            os.execvpe(on_exit["argv"][0], on_exit["argv"], env)
        except OSError as error:
            log_stderr(f"cannot start {on_exit['argv'][0]}: {error}")
        finally:
            os._exit(127)
