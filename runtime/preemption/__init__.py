"""Preemption: notices from the platform, agreement of the ranks on a step, and what is saved before the end."""
