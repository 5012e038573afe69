"""Programs that run on the nodes: standard library only, Python 3.8 and later, sent over SSH for each use.

Nothing here is imported on the laptop but as text (cluster/ssh.py).
"""
