"""How much memory modules take, and which device holds which of them."""
