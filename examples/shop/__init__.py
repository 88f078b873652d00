"""
A small shop: customers place and pay orders over HTTP, and get mails; unpaid orders are closed after two days.

Messages go through the outbox, so each message commits with its order. Handlers use the inbox, so their effects in the
database happen exactly once.

    python examples/shop
"""
