"""Trains a language model on sequences that are split over processes, each of which holds a span of every sequence.

Every process runs this script, and ``torchrun`` starts them: on CPUs with gloo, with ``--device cuda`` on one GPU each with
NCCL. The model's mixers exchange states (:class:`ssm_kernels.distributed.ContextParallel`), and its parameters and the
optimizer are sharded (``fully_shard``). The text is the one of ``char_lm.py``:

    torchrun --nproc-per-node 2 examples/long_context.py --plot curve.png
    torchrun --nproc-per-node 4 examples/long_context.py --seqlen 65536 --device cuda

Ctrl-C saves the run and prints the command that resumes it, on any number of processes. Sequences and learning rate depend
only on the seed and the number of steps. The losses of a resumed run equal those of a run that was never stopped, up to
rounding if the number of processes changes. A larger ``--steps`` lengthens a run, also a finished one. No file is replaced
without ``--overwrite``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Ctrl-C while the packages load ends the script without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import ssm_kernels
from ssm_kernels.distributed import ContextParallel
from ssm_kernels.models import MambaLM

try:
    import training
    from char_lm import MIXERS, History, learning_curve, load_text, make_model, windows
    from tqdm import tqdm
    from training import Mistake, Session, describe, number
except ImportError as error:
    sys.exit(f"{Path(__file__).name}: error: {error}: pip install tqdm matplotlib")

HISTORY = "history.json"


def split_model(model: MambaLM, mesh: DeviceMesh) -> MambaLM:
    """Splits sequences over the mesh in every mixer, and parameters over the mesh in every block."""
    parallelize_module(model, mesh, ContextParallel())
    for block in model.backbone.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def my_span(tokens: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """This process's span of the inputs, and the tokens that it predicts."""
    rank, processes = mesh.get_local_rank(), mesh.size()
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    return inputs.tensor_split(processes, dim=1)[rank], targets.tensor_split(processes, dim=1)[rank]


def loss_of(model: MambaLM, tokens: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """The loss to differentiate, and this process's part of the mean loss of the sequences, in bits per byte."""
    inputs, targets = my_span(tokens, mesh)
    total = F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    part = total / (math.log(2) * (tokens.shape[1] - 1) * tokens.shape[0])
    # fully_shard averages gradients over the processes, but the gradient of the whole loss is the sum of theirs.
    return part * mesh.size(), part.detach()


def summed(part: Tensor) -> float:
    dist.all_reduce(part)
    return part.item()


def training_batch(text: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """The sequences of a step, the same in every process."""
    generator = torch.Generator().manual_seed(1_000_000 * args.seed + step)
    starts = torch.randint(len(text) - args.seqlen, (args.batch_size,), generator=generator)
    return windows(text, starts, args.seqlen).to(args.device)


@torch.no_grad()
def test_loss(model: MambaLM, text: Tensor, mesh: DeviceMesh, args: argparse.Namespace) -> float:
    """Mean loss of up to eight sequences, evenly spread over the text."""
    count = min(8, len(text) // (args.seqlen + 1))
    starts = torch.linspace(0, len(text) - args.seqlen - 1, count, dtype=torch.float64).long()
    parts = [loss_of(model, windows(text, start[None], args.seqlen).to(args.device), mesh)[1] for start in starts]
    return summed(torch.stack(parts).mean())


def save(folder: Path, states: dict[str, Any], history: dict[str, Any]) -> None:
    """Writes beside the last checkpoint and then replaces it, so that a run killed here loses nothing."""
    partial, old = folder.with_name(folder.name + ".partial"), folder.with_name(folder.name + ".old")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    dcp.save(states, checkpoint_id=partial)
    if dist.get_rank() == 0:
        (partial / HISTORY).write_text(json.dumps(history))
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            os.replace(folder, old)
        os.replace(partial, folder)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def steps_of(folder: Path) -> int:
    """Steps of a complete checkpoint, otherwise 0: :func:`save` writes the history last."""
    try:
        return len(json.loads((folder / HISTORY).read_text())["losses"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def find_checkpoint(folder: Path) -> Path | None:
    """The last complete checkpoint: a run that was killed in :func:`save` has it beside the folder."""
    if folder.is_dir():
        return folder
    return next((each for end in (".partial", ".old") if steps_of(each := folder.with_name(folder.name + end))), None)


def restore(folder: Path) -> None:
    """Moves the last complete checkpoint to the folder, where :func:`save` keeps it until the next one is complete."""
    dist.barrier()  # Every process has found the checkpoint in parse_arguments.
    if dist.get_rank() == 0 and (found := find_checkpoint(folder)) not in (None, folder):
        os.replace(found, folder)
    dist.barrier()


def load_history(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The history of a checkpoint of a run with these settings, and whether this run is longer."""
    try:
        history = json.loads((folder / HISTORY).read_text())
        longer = training.check_run(folder, history["run"], settings, "steps")
        len(history["losses"]), len(history["tests"])
    except (OSError, ValueError, LookupError, TypeError):
        raise Mistake(f"{folder} is not a checkpoint of this script") from None
    return history, longer


def check_folder(parser: training.Parser, args: argparse.Namespace) -> None:
    """Ends the script if ``--checkpoint`` or ``--resume`` cannot work, or would overwrite a checkpoint or another folder."""
    folder = args.checkpoint
    if folder is not None and folder.exists() and not folder.is_dir():
        parser.error(f"argument --checkpoint: {folder} is a file, expected a folder")
    if folder is not None and not os.access(folder.absolute().parent, os.W_OK):
        parser.error(f"argument --checkpoint: cannot write {folder}")
    found = None if folder is None else find_checkpoint(folder)
    if args.resume and found is None:
        parser.error(f"argument --resume: no checkpoint to continue from: {folder or 'give --checkpoint FOLDER'}")
    if found is not None and not args.resume:
        # An overwritten folder disappears with all that is in it.
        if not steps_of(found) and any(found.iterdir()):
            parser.error(f"argument --checkpoint: {found} has other files than a checkpoint: choose another folder")
        if steps_of(found) and not args.overwrite:
            parser.error(f"argument --checkpoint: {found} exists: continue it with --resume, or replace it with --overwrite")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = training.Parser(__file__, __doc__)
    parser.add_argument("--model", default="mamba2", choices=MIXERS, help="default: mamba2")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text file to learn; default: Python's reference pages")
    parser.add_argument("--steps", type=number(int, 1, 10**9), default=200, help="default: 200")
    parser.add_argument("--batch-size", type=number(int, 1, 10_000), default=1, help="sequences of a step; default: 1")
    parser.add_argument("--seqlen", type=number(int, 1, 10**7), default=4096, help="bytes of a whole sequence; default: 4096")
    rules = ssm_kernels.discretizations
    training.add_options(parser, rules, lr=6e-3, d_model=128, checkpoint="four times", metavar="FOLDER")
    args = parser.parse_args(argv)
    training.check_rule(parser, args, [args.model])
    args.discretization = args.discretization or "zoh"
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as in: torchrun --nproc-per-node 2 examples/long_context.py")
    if args.device not in ("cpu", "cuda"):
        parser.error(f"argument --device: expected cpu or cuda, got {args.device}")
    if args.device == "cuda" and int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
        parser.error(
            f"argument --device cuda: expected a GPU for each process of this machine, got {torch.cuda.device_count()}"
        )
    check_folder(parser, args)
    training.check_outputs(parser, args, {"plot": args.plot})

    def attempt(_: torch.device) -> None:
        with torch.device("meta"):
            make_model(args.model, 16, 1, args.discretization)

    device = args.device
    training.check_device(parser, args, attempt)
    args.device = device  # the name, which init_device_mesh takes
    return args


def any_process(flag: bool, mesh: DeviceMesh) -> bool:
    flags = torch.tensor(float(flag), device=mesh.device_type)
    dist.all_reduce(flags)
    return flags.item() > 0


def train(args: argparse.Namespace, mesh: DeviceMesh, session: Session) -> dict[str, Any]:
    """Trains from scratch or from a checkpoint until the last step or ``--max-steps``; returns the history."""
    train_text, test_text = load_text(args.text, args.seqlen)
    if args.seqlen < mesh.size():
        raise Mistake(f"--seqlen {args.seqlen} is too short for {mesh.size()} processes, which need a step each")
    torch.manual_seed(args.seed)
    # No process ever holds the whole model: memory for its own shards is made after the split, and numbers in it last.
    with torch.device("meta"):
        model = make_model(args.model, args.d_model, args.n_layers, args.discretization)
    split_model(model, mesh).to_empty(device=args.device)
    model.init_weights()
    optimizer, schedule = training.make_optimizer(model, args.lr, args.steps, weight_decay=0.1, betas=(0.9, 0.95), last_lr=0.1)
    options = ("model", "discretization", "steps", "batch_size", "seqlen", "lr", "d_model", "n_layers", "seed")
    settings = {name: getattr(args, name) for name in options}
    (rate,) = set(schedule.lr_lambdas)
    history: dict[str, Any] = {"run": settings, "losses": [], "tests": [], "lengths": rate.lengths}
    last_step = min(args.max_steps or args.steps, args.steps)
    if args.checkpoint is not None:
        restore(args.checkpoint)
    if args.resume:
        loaded, longer = load_history(args.checkpoint, settings)
        training.check_last_step(args.checkpoint, len(loaded["losses"]), args.max_steps)
        history |= {name: loaded[name] for name in history if name in loaded and name != "run"}
        rate.lengths = history["lengths"]
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=args.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        for _ in history["losses"]:
            schedule.step()
        if longer:
            training.lengthen(schedule, len(history["losses"]), args.steps)
    done = len(history["losses"])

    def save_run(folder: Path) -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        save(folder, {"model": model_state, "optimizer": optimizer_state}, history)

    def tell_session() -> None:
        session.progress = f"after {len(history['losses'])} of {args.steps} steps of {name}"

    name = describe(args.model, args.discretization)
    interval = max(1, args.steps // 4)
    tell_session()
    session.checkpoint = args.checkpoint
    session.saves[""] = save_run
    with tqdm(total=last_step, initial=done, unit="step", desc=name, mininterval=0.5, disable=dist.get_rank() != 0) as progress:
        for step in range(done, last_step):
            loss, part = loss_of(model, training_batch(train_text, step, args), mesh)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            history["losses"].append(summed(part))
            if not math.isfinite(history["losses"][-1]):
                raise Mistake(f"the loss is {history['losses'][-1]} in step {step + 1}: try a lower --lr")
            if (step + 1) % interval == 0 or step + 1 == last_step:
                history["tests"].append((step + 1, test_loss(model, test_text, mesh, args)))
                if args.checkpoint is not None:
                    save_run(args.checkpoint)
                    session.saved = f"{args.checkpoint} has {step + 1} steps"
            test = f"{history['tests'][-1][1]:.2f}" if history["tests"] else "-"
            progress.set_postfix(loss=f"{history['losses'][-1]:.2f}", test=test, refresh=False)
            progress.update()
            tell_session()
            session.pause(lambda requested: any_process(requested, mesh))
    if not history["tests"] or history["tests"][-1][0] < done:  # Ctrl-C stopped the run here, and nothing is left to train.
        history["tests"].append((done, test_loss(model, test_text, mesh, args)))
    session.saves.clear()  # From here on the processes do not stop together.
    return history


def main(argv: list[str] | None = None) -> None:
    try:
        with Session(__file__, argv, speaks=os.environ.get("RANK") == "0") as session:
            args = parse_arguments(argv)
            session.outputs = [args.plot]
            torch.set_num_threads(args.threads)
            if args.device == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            with session.deferred():
                run(args, session)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run(args: argparse.Namespace, session: Session) -> None:
    """Trains, and prints and draws the result in the first process."""
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    start = time.perf_counter()
    mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("context",))
    history = train(args, mesh, session)
    if dist.get_rank() > 0:
        return
    seconds, processes = time.perf_counter() - start, f"{mesh.size()} process{'es' if mesh.size() > 1 else ''}"
    name = describe(args.model, args.discretization)
    print(
        f"test loss: {history['tests'][-1][1]:.2f} bits per byte after {len(history['losses'])} steps, "
        f"{seconds:.0f} s on {processes}, {name}"
    )
    if args.plot is not None:
        curve = History(history["losses"], history["tests"])
        training.save_figure(args.plot, lambda: learning_curve(curve, f"{name}, {args.seqlen} bytes on {processes}"))
        print(f"learning curve: {args.plot}")


if __name__ == "__main__":
    main()
