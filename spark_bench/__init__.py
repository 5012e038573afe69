"""How many songs one Spark should render at once: a controlled experiment, and its analysis from the raw results alone.

It is sent to a node as it is, so everything but remote.py is Python 3.8 and its standard library.
"""
