"""Machines reached over SSH: configuration, host keys, logins, one pooled connection each, and what runs over it."""
