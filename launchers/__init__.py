"""The launch layer: how a job reaches machines.

Two independent axes, never mixed: a *command* (`orc.launchers.commands`) says how processes start on a given set of
nodes, a *backend* (`orc.launchers.backends`) says where nodes come from and how a plan gets run there.
Nothing here imports torch, and nothing here is imported by the training process except `orc.runtime.config`.
"""
