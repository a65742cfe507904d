"""Remote machines: running commands, moving files and shipping code, on this machine and over SSH."""
