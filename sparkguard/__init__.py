"""Sparkguard adds up what inference servers reserve, before the kernel's OOM killer does.

core/        pure: the arithmetic and its words
probe/       reads the machine: processes, engines, memory pools
ledger.py    reservations of starts under way
settings.py  environment, model specs and spark.conf (whose syntax is conf_file.py)
guard.py     the verdict before a start (ExecStartPre=)
launch.py    environment, CPU isolation and exec of the server
cli/         the sparkguard command
"""

__version__ = "0.1.0"
