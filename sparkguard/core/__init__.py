"""Pure: no I/O, clock, environment, logging or globals."""
