"""The studio: pictures, data sets, models, figures, evaluation, atlas, export and command line, around the core."""
