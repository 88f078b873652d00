"""Integrations with web frameworks. An application imports only the integration of its own framework."""
