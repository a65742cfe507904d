"""Jinja2 templates of everything that is rendered as text, and starter jobs for ``orc init``."""
