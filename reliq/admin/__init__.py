"""What a person on call sees and does: every command of the terminal is a method of `Admin` first."""

from reliq.admin.admin import Admin

__all__ = ["Admin"]
