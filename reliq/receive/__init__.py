"""`Queue.receive`: claim messages in a `with` block, renew their leases while it runs, and settle them at its end."""
