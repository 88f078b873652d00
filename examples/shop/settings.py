"""The settings of the shop, from environment variables."""

import os

DATABASE = os.environ.get("SHOP_DATABASE", "sqlite:///shop.db")
#: An HTTP server that takes mails as JSON. It ignores a mail with an Idempotency-Key that it has had before.
MAIL_HOOK = os.environ.get("SHOP_MAIL_HOOK", "http://127.0.0.1:8025")
#: An order is closed if it is not paid within this many seconds.
PAY_WITHIN = float(os.environ.get("SHOP_PAY_WITHIN", "172800"))
BOSS = "boss@shop.example"
