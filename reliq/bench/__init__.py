"""`reliq bench`: measures this reliq on a Redis, beside the bare scripts on the same one."""

#: What it measures, in this order.
PARTS = ("drain", "publish", "lateness", "pickup", "idle", "memory")
