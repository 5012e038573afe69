"""The catalog, models.toml, and what its models are as containers."""
