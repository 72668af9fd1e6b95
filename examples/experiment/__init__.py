"""The parts of ``examples/paper.py`` and ``examples/which_method.py``: data, frozen features, training, reports."""
