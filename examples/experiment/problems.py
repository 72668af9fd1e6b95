"""What can go wrong in a run, said so that the reader knows what to do."""


class RunError(Exception):
    """A run that cannot go on: its message says why, and what to do. Earlier results are left as they are."""
