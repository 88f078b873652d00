"""The order of the test files."""

#: The slowest test files, the slowest first: all other tests would wait for a slow file that begins last.
LONGEST_FIRST = (
    "metrics/test_story.py",
    "misbehaviour/test_misbehaviour.py",
    "acceptance/test_supervisor.py",
    "acceptance/test_nothing_is_lost.py",
    "misbehaviour/test_held_interpreter.py",
    "web/test_browser.py",
    "acceptance/test_starts_and_stops.py",
    "security/test_fuzz_worker.py",
    "admin/test_killed.py",
    "worker/test_leases.py",
    "faults/test_server_faults.py",
    "bench/test_bench_command.py",
    "scripts/test_model.py",
    "queue/test_connections.py",
    "readme/test_docs.py",
    "queue/test_lost_replies.py",
    "queue/test_dropped_connections.py",
    "house/test_types.py",
    "security/test_tls.py",
    "outbox/test_kills.py",
    "durability/test_sentinel.py",
    "admin/test_hostile_queue.py",
    "worker/test_waiting.py",
)
