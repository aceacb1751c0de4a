"""The parts of ``profile_discretization.py``: timings, comparison with the exact solution, tables and plots."""
