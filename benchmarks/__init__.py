"""reliq beside other job queues on Redis: the same work for each, in turns, on one machine."""
