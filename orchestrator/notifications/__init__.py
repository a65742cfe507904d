"""Notifications: what people are told of their jobs, and how it reaches them."""
