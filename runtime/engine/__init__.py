"""The engine owns backward, step, clipping, gradient synchronisation and the state dict. There is exactly one.

A new engine is a module here with an attribute ``ENGINE``, a class that keeps the contract in `train.engine`, where
``_name`` names it by the layout, or by what computes. One of a library is a folder, which `core.libraries` finds.
"""
