"""Functions: Python functions as jobs."""
