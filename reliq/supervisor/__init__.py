"""
The processes of `reliq worker`.

    worker.py       the command, after its options are parsed
    supervisor.py   starts, watches and replaces the worker processes, and notifies systemd
    child.py        the supervisor's view of a worker process, and the folder for the metrics of all processes
    guard_main.py   the guard: kills the worker processes of a killed supervisor
    main.py         the program of a worker process
    plan.py         the settings that the supervisor sends to a worker process
    status.py       the status that a worker process writes to shared memory for the supervisor
    recovery.py     renews the leases of silent processes, and returns the messages of dead processes
"""
