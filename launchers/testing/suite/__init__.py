"""Behaviours that every backend has, as tests; `plugin` collects them."""
