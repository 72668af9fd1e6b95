"""The parts of ``examples/paper.py`` and ``examples/faithfulness.py``: data, frozen features, training, reports."""
