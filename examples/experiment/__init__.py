"""The parts of ``examples/paper.py``: data sets, frozen features, training, evaluation, report."""
