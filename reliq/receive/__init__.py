"""Messages without a decorator: claimed, renewed while a block runs, and settled at its end."""
