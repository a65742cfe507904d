"""Replication of checkpoints between machines without a shared file system."""
