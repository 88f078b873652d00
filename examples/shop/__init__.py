"""
A small shop: orders are placed and paid over HTTP, closed when nobody pays, and mails tell the customers.

Every message is written in the transaction that it belongs to, and every handler has its effects once.

    python examples/shop
"""
