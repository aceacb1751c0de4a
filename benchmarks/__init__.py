"""Measuring ssm_kernels: run from a checkout, not installed with the package."""
