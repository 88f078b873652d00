"""In which order files of tests begin."""

#: The files that take longest, the longest first, by what they took: one that begins last is waited for by all.
LONGEST_FIRST = (
    "misbehaviour/test_misbehaviour.py",
    "chaos/test_chaos.py",
    "chaos/test_chaos_of_a_cluster.py",
    "security/test_fuzz_worker.py",
    "acceptance/test_nothing_is_lost.py",
    "acceptance/test_supervisor.py",
    "acceptance/test_starts_and_stops.py",
    "house/test_types.py",
    "readme/test_readme.py",
    "metrics/test_children.py",
    "metrics/test_story.py",
    "bench/test_bench_command.py",
    "web/test_browser.py",
    "admin/test_hostile_queue.py",
)
