"""Publish a greeting: `python -m app Ada`."""

import sys

from app.queues import GREETINGS, Greeting

if __name__ == "__main__":
    receipt = GREETINGS.publish(Greeting(" ".join(sys.argv[1:]) or "World"))
    print(receipt.status, receipt.id)
