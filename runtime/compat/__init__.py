"""Compatibility: what is installed here, documented configuration files and small questions that scripts ask."""
