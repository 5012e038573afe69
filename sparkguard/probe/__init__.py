"""Reads the world and returns core types; never writes. Every root (/proc, /sys) is an argument."""
