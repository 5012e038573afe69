"""Benchmarks of what serves: prompts, a strict streaming client, the load, checks, leases, history, comparison."""
