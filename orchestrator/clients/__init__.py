"""Clients: the protocol that all of them satisfy, and those that talk to a service."""
