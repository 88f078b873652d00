"""
The processes of `reliq worker`.

worker.py is the command, with --reload. supervisor.py starts, watches and replaces the processes, and notifies systemd;
child.py is one of them as the supervisor sees it, with the folder of their files and the guard (guard_main.py) that ends
the processes of a killed supervisor. main.py is the program of such a process, by the plan of plan.py; both share the
memory of status.py. recovery.py settles the messages of a silent or dead process.
"""
