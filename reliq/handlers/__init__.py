"""Handlers: how a consumer registers them, the job that they get, and how their answers settle messages."""
