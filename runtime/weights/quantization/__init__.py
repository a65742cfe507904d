"""Models with linear layers in eight or four bits: what is quantized, by which library, and loading one."""
