"""Clusters of kind pods."""
