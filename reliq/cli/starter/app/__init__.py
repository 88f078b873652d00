"""A small application on reliq."""
