"""
The processes of `reliq worker`.

supervisor.py starts, watches and replaces the processes (child.py: one of them, as the supervisor sees it);
main.py is what such a process runs, by the plan that plan.py describes; both share the memory of consumer/board.py.
gil.py finds the thread that holds an interpreter, and recovery.py and leases.py settle what a silent or dead process
holds. folder.py keeps their files, guard.py starts guard_main.py, which ends what a killed supervisor leaves behind,
orphans.py collects what a container's first process inherits, and service_manager.py tells systemd that a worker is ready
and alive.
"""
