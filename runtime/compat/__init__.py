"""Compatibility: installed packages, documented configuration files and small helpers of scripts."""
