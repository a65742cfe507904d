"""Collectives over nested structures: flatten once, one packed collective per kind of payload, rebuild.

Every function takes the `RunContext` as its keyword ``ctx``, the current one by default. With one process all of them
return their input.
"""
