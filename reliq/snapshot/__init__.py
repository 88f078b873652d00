"""One look at queues in Redis, a few round trips whatever their number and length."""
