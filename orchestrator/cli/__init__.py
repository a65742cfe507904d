"""The command line. Start-up imports click only; every command imports what it needs when it runs."""
