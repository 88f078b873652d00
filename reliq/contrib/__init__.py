"""Integrations with web frameworks. Each is imported only by applications of its framework."""
