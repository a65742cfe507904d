"""The orchestrator: ledger, reconciler, command line and Python client."""
