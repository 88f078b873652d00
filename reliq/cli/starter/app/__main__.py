"""Publish a greeting: `python -m app Ada`."""

import sys

from app.tasks import greet

if __name__ == "__main__":
    receipt = greet.publish(" ".join(sys.argv[1:]) or "World")
    print(receipt.status, receipt.id)
