"""Snapshots: what a job's code is, named by one digest, and the content-addressed stores that hold them."""
