"""Other packages' models and tools on the operators of this one. Each module imports the package that it serves."""
