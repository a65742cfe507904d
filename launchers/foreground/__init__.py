"""Foreground launches: `orc launch` and Python launchers, without a ledger, a snapshot or an agent."""
