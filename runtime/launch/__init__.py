"""Start of a process: launch environment, device, process group and the addresses it listens on."""
