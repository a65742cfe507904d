"""Commands: `orc NAME` is NAME_command of the module that `orc.orchestrator.cli.main.load` chooses."""
