"""Integrations with frameworks. Only the framework imports its integration."""
