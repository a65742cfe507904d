"""Notifications of jobs: messages about their ends and failures, and their delivery."""
