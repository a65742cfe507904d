"""Rank hooks: what is put into the interpreter of a rank before its script runs."""
