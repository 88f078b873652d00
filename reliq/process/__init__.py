"""The processes of a worker: a supervisor, its children, and what ends both."""
