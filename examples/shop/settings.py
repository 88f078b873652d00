"""The environment of the shop."""

import os

DATABASE = os.environ.get("SHOP_DATABASE", "sqlite:///shop.db")
#: An HTTP server that takes mails as JSON, and knows one that it has had by its Idempotency-Key.
MAIL_HOOK = os.environ.get("SHOP_MAIL_HOOK", "http://127.0.0.1:8025")
#: An order is closed when it is not paid in so many seconds.
PAY_WITHIN = float(os.environ.get("SHOP_PAY_WITHIN", "172800"))
BOSS = "boss@shop.example"
