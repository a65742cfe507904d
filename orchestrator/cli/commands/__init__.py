"""Commands: one module per sub-command of `orc`, each with a `command` attribute."""
