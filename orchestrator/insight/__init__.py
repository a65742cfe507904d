"""Insight: what running jobs measure, and what their processes do."""
