"""What is decided and remembered: the ledger, the reconciler, the command line and the Python client."""
