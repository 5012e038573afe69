"""The HTTP front of the supervisor: the model APIs, the control API, metrics, and the page."""
