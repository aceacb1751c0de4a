"""The parts of ``profile_discretization.py``: what is timed, what is compared with the exact solution, tables and plots."""
