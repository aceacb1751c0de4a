"""The training examples, called as tests call them: their shortest arguments, and a test's ``example``."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

for package in ("sklearn", "tqdm", "matplotlib"):
    if importlib.util.find_spec(package) is None:  # found, not imported: every worker collects the tests, and some run them
        pytest.skip(f"the examples need {package}, which is not installed", allow_module_level=True)

TRAIN = Path(__file__).parents[2] / "examples" / "train_sequence.py"
CHAR_LM = TRAIN.with_name("char_lm.py")
LONG_CONTEXT = TRAIN.with_name("long_context.py")
# As Python does for a script: the scripts import training.py, which is beside them.
sys.path.insert(0, str(TRAIN.parent))

import training  # noqa: E402, F401

# 2 epochs of 13 steps.
SHORT = ["--epochs", "2", "--batch-size", "100", "--d-model", "8", "--n-layers", "1"]
# A file that does not change: two rules can give the same losses of a few steps.
TEXT = TRAIN.parents[1] / "LICENSE"
# 4 steps of 3 sequences of 20 bytes.
SHORT_LM = ["--steps", "4", "--batch-size", "3", "--seqlen", "20", "--d-model", "16", "--n-layers", "1", "--sample", "30"]
SHORT_LM += ["--text", str(TEXT)]
SHORT_LONG_CONTEXT = ["--steps=4", "--seqlen=50", "--d-model=16", "--n-layers=1", f"--text={TEXT}"]
SHORT_OF = {TRAIN: SHORT, CHAR_LM: SHORT_LM, LONG_CONTEXT: SHORT_LONG_CONTEXT}


class Example:
    """An example script. Tests call its ``main``, which is quicker than a process."""

    def __init__(self, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.script, self.short, self.capsys = script, SHORT_OF[script], capsys
        self.main = runpy.run_path(str(script))["main"]

    def run(self, *arguments: str | Path) -> str:
        """Returns what the example prints."""
        self.main([str(argument) for argument in arguments])
        return self.capsys.readouterr().out

    def refuse(self, *arguments: str | Path) -> str:
        """Returns the one line that the example writes to stderr when it refuses the arguments."""
        with pytest.raises(SystemExit) as stop:
            self.run(*arguments)
        assert stop.value.code
        # A message as the exit code is printed by the interpreter.
        message = self.capsys.readouterr().err + (f"{stop.value.code}\n" if isinstance(stop.value.code, str) else "")
        assert message.startswith(f"{self.script.name}: error: ") and message.index("\n") == len(message) - 1, message
        return message


@pytest.fixture
def example(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Example]:
    threads = torch.get_num_threads()
    yield Example(request.param, capsys)
    torch.set_num_threads(threads)


def name_of(value: object) -> str | None:
    return value.stem if isinstance(value, Path) else None


each_example = pytest.mark.parametrize("example", [TRAIN, CHAR_LM], indirect=True, ids=name_of)
train = pytest.mark.parametrize("example", [TRAIN], indirect=True, ids=name_of)
char_lm = pytest.mark.parametrize("example", [CHAR_LM], indirect=True, ids=name_of)


def read(checkpoint: Path) -> dict:
    return torch.load(checkpoint, weights_only=True)
