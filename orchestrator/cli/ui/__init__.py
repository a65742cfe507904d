"""User interface of the command line: tables, charts, progress, escaping of what is printed."""
