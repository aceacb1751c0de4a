# The compiled module of csrc/python_module.cpp: what was built.
version: str
torch: str
cuda: str | None
architectures: tuple[str, ...]
cpu_capabilities: tuple[str, ...]
compiler: str
discretizations: tuple[str, ...]
discretization_aliases: dict[str, str]
