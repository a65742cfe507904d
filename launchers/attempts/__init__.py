"""Attempts: the configuration that agents read, the records that they write, and readers of both."""
