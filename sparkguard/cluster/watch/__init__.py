"""What the nodes and the models do, tick by tick."""
