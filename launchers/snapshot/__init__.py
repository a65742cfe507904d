"""Snapshots of a job's code, each named by one digest, and the content-addressed stores that hold them."""
