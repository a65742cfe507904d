"""Engine: how jobs go from submitted to ended; pure decisions and the thin I/O around them."""
