"""Flags and files of `accelerate launch`: the table of documented options, and what reads and converts such files."""
