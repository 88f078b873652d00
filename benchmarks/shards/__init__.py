"""What a Cluster and shards cost beside one Redis: `python -m benchmarks.shards`."""
