"""Register handler functions, call them with jobs, and settle the messages by the results of the functions."""
