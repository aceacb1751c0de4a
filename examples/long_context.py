"""Trains a language model on sequences that are split over processes, each of which holds a span of every sequence.

Every process runs this script, and ``torchrun`` starts them: on CPUs with gloo, with ``--device cuda`` on one GPU each with
NCCL. The model's mixers exchange states (:class:`ssm_kernels.distributed.ContextParallel`), and its parameters and the
optimizer are sharded (``fully_shard``). The text is the one of ``char_lm.py``:

    torchrun --nproc-per-node 2 examples/long_context.py --plot curve.png
    torchrun --nproc-per-node 4 examples/long_context.py --seqlen 65536 --device cuda

Stop and continue with ``--checkpoint folder`` and ``--checkpoint folder --resume``, on any number of processes: sequences and
learning rate depend only on the seed and the number of steps. The losses of a resumed run equal those of a run that was never
stopped, up to rounding if the number of processes changes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

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
    from training import Mistake, describe, number
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


def load_history(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    try:
        history = json.loads((folder / HISTORY).read_text())
        saved = history["run"]
        other = {name: (saved[name], value) for name, value in settings.items() if saved[name] != value}
    except (OSError, ValueError, LookupError, TypeError):
        raise Mistake(f"{folder} is not a checkpoint of this script") from None
    if other:
        differences = ", ".join(f"{name} {was}, not {now}" for name, (was, now) in other.items())
        raise Mistake(f"{folder} belongs to another run: {differences}")
    return history


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
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as in: torchrun --nproc-per-node 2 examples/long_context.py")
    if args.device not in ("cpu", "cuda"):
        parser.error(f"argument --device: expected cpu or cuda, got {args.device}")
    if args.resume and (args.checkpoint is None or find_checkpoint(args.checkpoint) is None):
        parser.error(f"argument --resume: no checkpoint to continue from: {args.checkpoint or 'give --checkpoint FOLDER'}")
    return args


def train(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
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
    history: dict[str, Any] = {"run": {name: getattr(args, name) for name in options}, "losses": [], "tests": []}
    last_step = min(args.max_steps or args.steps, args.steps)
    if args.checkpoint is not None:
        restore(args.checkpoint)
    if args.resume:
        history = load_history(args.checkpoint, history["run"])
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=args.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        for _ in history["losses"]:
            schedule.step()
    done = len(history["losses"])
    if done >= last_step:
        raise Mistake(f"{args.checkpoint} has done {done} steps already, and this run ends after {last_step}")
    name = describe(args.model, args.discretization)
    interval = max(1, args.steps // 4)
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
                    model_state, optimizer_state = get_state_dict(model, optimizer)
                    save(args.checkpoint, {"model": model_state, "optimizer": optimizer_state}, history)
            test = f"{history['tests'][-1][1]:.2f}" if history["tests"] else "-"
            progress.set_postfix(loss=f"{history['losses'][-1]:.2f}", test=test, refresh=False)
            progress.update()
    return history


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        start = time.perf_counter()
        mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("context",))
        with training.mistakes_in_one_line(__file__):
            history = train(args, mesh)
        if dist.get_rank() == 0:
            seconds, processes = time.perf_counter() - start, f"{mesh.size()} process{'es' if mesh.size() > 1 else ''}"
            print(
                f"test loss: {history['tests'][-1][1]:.2f} bits per byte after {len(history['losses'])} steps, "
                f"{seconds:.0f} s on {processes}, {describe(args.model, args.discretization)}"
            )
            if args.plot is not None:
                title = f"{describe(args.model, args.discretization)}, {args.seqlen} bytes on {processes}"
                curve = History(history["losses"], history["tests"])
                training.save_figure(args.plot, lambda: learning_curve(curve, title))
                print(f"learning curve: {args.plot}")
    except KeyboardInterrupt:
        if os.environ["RANK"] == "0":
            saved = args.checkpoint and find_checkpoint(args.checkpoint)
            steps = steps_of(saved) if saved else 0
            print(f"stopped: {f'{saved} has the checkpoint of step {steps}' if steps else 'there is no checkpoint'}")
        sys.exit(130)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
