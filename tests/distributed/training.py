"""A small training run, the same for one process and for many.

deepspeed --no_local_rank --num_gpus 2 --module tests.distributed.training SCENARIO FOLDER
"""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.saving import save_model
from draftsmith.distill import deepspeed_engine
from draftsmith.distill.deepspeed_engine import DeepSpeedEngine, make_engine, start_processes
from draftsmith.distill.engine import Engine, TorchEngine
from draftsmith.errors import DraftsmithError
from tests.conftest import TINY_VOCAB, make_model

STAGES = (1, 2, 3)
VARIANTS = [(zero, tied) for zero, tied in product(STAGES, (True, False))]
STEPS = 4
LR = 1e-2
CLIP = 1.0
# Of the run that is killed: its last step, and how often it saves.
LONG_STEPS, SAVE_EVERY = 6, 2

Row = tuple[Tensor, int]


class Head(nn.Module):
    """Owns the head's weight, which may be the embedding's as well."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden_AH: Tensor, labels_A: Tensor) -> Tensor:
        return nn.functional.cross_entropy(hidden_AH @ self.weight.T, labels_A, reduction="sum")


class LossModule(nn.Module):
    """Sum of a causal model's cross-entropy over the answer of a row."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.head = Head(self.causal.get_output_embeddings().weight)

    def forward(self, row: Row, masks_H: Tensor | None = None) -> Tensor:
        ids_T, answers = row
        output = self.causal.base_model(input_ids=ids_T[None], use_cache=False)
        hidden_TH = output.last_hidden_state[0]
        if masks_H is not None:
            hidden_TH = hidden_TH * masks_H
        return self.head(hidden_TH[-answers - 1 : -1], ids_T[-answers:])


def rows_of(step: int, answers: tuple[int, ...] = (1, 3, 2, 5)) -> list[Row]:
    """The rows of a step, of different lengths, each a micro-batch."""
    generator = torch.Generator().manual_seed(step)
    return [
        (torch.randint(TINY_VOCAB, (6 + 2 * i,), generator=generator), count)
        for i, count in enumerate(answers)
    ]


def probe() -> Tensor:
    """Token ids [1, T] at which logits are compared."""
    return torch.arange(3, 15)[None]


@dataclass
class Log:
    """What a run writes down."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def engine_of(
    module: nn.Module, folder: Path, zero: int = 3, optimizer: Callable[..., Any] | None = None
) -> Engine:
    """An engine for the launched processes, as the training loops make it."""
    learning = [p for p in module.parameters() if p.requires_grad]
    if optimizer is None:
        # With the usual eps Adam makes as much of a gradient that is rounding error as of any.
        adam = torch.optim.AdamW(learning, lr=LR, eps=1e-4, weight_decay=0.1, fused=True)
        scheduler = LambdaLR(adam, lambda step: 1 / (1 + step))
        return make_engine(module, adam, folder, scheduler, CLIP, zero=zero)
    return make_engine(module, optimizer(learning), folder, zero=zero)


def advance(engine: Engine, rows: list[Row], *extra_inputs: Any) -> tuple[float, float]:
    """One step; its loss and the gradient norm."""
    mine = engine.ranks.share(rows)
    tokens = engine.ranks.total(sum(answers for _, answers in mine))
    mean = 0.0
    for row in mine:
        loss = engine(row, *extra_inputs) / tokens
        engine.backward(loss)
        mean += float(loss.detach())
    norm = engine.step()
    return engine.ranks.total(mean), norm


def train(engine: Engine, steps: int, save_every: int = 0) -> Log:
    """Train until `steps`, from the newest save."""
    log = Log(**engine.load())
    while engine.steps_done < steps:
        loss, norm = advance(engine, rows_of(engine.steps_done))
        log.losses.append(loss)
        log.norms.append(norm)
        if save_every and engine.steps_done % save_every == 0:
            engine.save(vars(log))
    return log


def equality(folder: Path) -> None:
    """Every stage, tied and untied: numbers, whole weights, and an HF folder (case A21)."""
    for zero, tied in VARIANTS:
        place = folder / f"{zero}-{'tied' if tied else 'untied'}"
        module = LossModule(make_model(tie_word_embeddings=tied))
        engine = engine_of(module, place / "state", zero)
        log = train(engine, STEPS)
        # As an evaluation during training: on every rank, past the engine's own module.
        with torch.inference_mode():
            logits = module.model(input_ids=probe()).logits
        advance_again = advance(engine, rows_of(STEPS))
        cut = not module.head.weight.numel()
        state = engine.full_state(module.model)
        engine.finish()
        shared = module.head.weight is module.model.get_input_embeddings().weight
        if engine.ranks.is_main:
            more = {"logits": logits.clone(), "after": advance_again, "shared": shared, "cut": cut}
            report(place, log, state, **more)
            export(module.model, folder, place)


def report(place: Path, log: Log, state: dict[str, Tensor], **more: Any) -> None:
    """Write down what came out."""
    place.mkdir(parents=True, exist_ok=True)
    torch.save({"log": vars(log), "state": state, **more}, place / "result.pt")


def export(model: Any, folder: Path, place: Path) -> None:
    """An HF folder of a finished model, and the logits that it must have."""
    (place / "hf").mkdir()
    save_model(model, resolve(str(folder / "tokenizer")), place / "hf")
    with torch.inference_mode():
        torch.save(model.eval()(input_ids=probe()).logits, place / "hf-logits.pt")


def one_step(folder: Path) -> None:
    """Case A25: rows of 1 and 3 answer tokens; plain SGD makes the weights show the gradients."""
    for zero in STAGES:
        module = LossModule(make_model(tie_word_embeddings=True))
        engine = engine_of(module, folder, zero, lambda p: torch.optim.SGD(p, lr=1.0))
        advance(engine, rows_of(0, answers=(1, 3)))
        state = engine.full_state(module.model)
        engine.finish()
        if engine.ranks.is_main:
            report(folder / str(zero), Log(), state)


def not_a_number(folder: Path) -> None:
    """Gradients that are no numbers on one rank alone."""
    for zero in STAGES:
        module = LossModule(make_model())
        engine = engine_of(module, folder, zero)
        before = engine.full_state()
        factor = float("nan") if engine.ranks.rank == 1 else 1.0
        error = ""
        engine.backward(engine(rows_of(0)[0]) * factor)
        try:
            engine.step()
        except DraftsmithError as caught:
            error = str(caught)
        errors, after = engine.ranks.gather(error), engine.full_state()
        engine.finish()
        if engine.ranks.is_main:
            same = all(torch.equal(before[name], after[name]) for name in before)
            report(folder / str(zero), Log(), {}, errors=errors, same=same)


def resume(folder: Path) -> None:
    """Case A22: saves that are whole, and a damaged newest one."""
    for zero in STAGES:
        place = folder / str(zero)
        train(fresh(place, zero), 4, save_every=2)
        again = fresh(place, zero)
        straight = train(again, LONG_STEPS)
        kept = sorted(p.name for p in place.iterdir())
        if again.ranks.is_main:
            damage(place / "step-0000004", zero)
        again.ranks.barrier()
        fallback = fresh(place, zero)
        extra = fallback.load()
        fell_back_to = fallback.steps_done
        log = train(fallback, LONG_STEPS)
        refused = refusals(fallback, place)
        if fallback.ranks.is_main:
            found = {"kept": kept, "to": fell_back_to, "extra": extra, "refused": refused}
            report(place, straight, {}, fallback=vars(log), **found)


def refusals(engine: Engine, place: Path) -> list[str]:
    """What each rank says to saves of three processes."""
    if engine.ranks.is_main:
        for path in place.glob("step-*.json"):
            path.write_text(path.read_text().replace('"world": 2', '"world": 3'))
    engine.ranks.barrier()
    try:
        engine.load()
    except DraftsmithError as error:
        return engine.ranks.gather(str(error))
    return []


def fresh(place: Path, zero: int) -> Engine:
    """An engine over a model from the start, with dropout, whose random numbers must go on."""
    torch.manual_seed(7)
    model = make_model(tie_word_embeddings=True, attention_dropout=0.1).train()
    return engine_of(LossModule(model), place, zero)


def damage(save: Path, zero: int) -> None:
    """A different kind for each stage: a file cut short, files gone, other bytes."""
    parts = sorted(save.glob("*optim_states.pt"))
    if zero == 1:
        parts[1].write_bytes(parts[1].read_bytes()[:-20])
    elif zero == 2:
        for part in save.iterdir():
            part.unlink()
    else:
        parts[0].write_bytes(b"x" * parts[0].stat().st_size)


def lora(folder: Path) -> None:
    """Case A23: adapters of rank 2 and a head that is trained in full, under ZeRO 3."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    torch.manual_seed(0)
    model = get_peft_model(make_model(), settings)
    engine = engine_of(LossModule(model), folder / "state", zero=3)
    log = train(engine, STEPS)
    state = engine.full_state(model)
    engine.finish()
    if engine.ranks.is_main:
        report(folder, log, get_peft_model_state_dict(model, state_dict=state) if state else {})
        model.save_pretrained(folder / "adapter")
        with torch.inference_mode():
            torch.save(model.eval()(input_ids=probe()).logits, folder / "logits.pt")


def masks_engine(place: Path) -> tuple[LossModule, nn.Parameter, TorchEngine]:
    """Masks over a frozen model: few parameters, whole on every rank."""
    module = LossModule(make_model(tie_word_embeddings=True)).requires_grad_(False)
    masks_H = nn.Parameter(torch.ones(32))
    adam = torch.optim.Adam([masks_H], lr=0.1)
    return module, masks_H, TorchEngine({"masks": masks_H}, adam, place, clip=CLIP, module=module)


def train_masks(place: Path, steps: int = STEPS) -> tuple[Log, Tensor]:
    """Train masks, saving in between."""
    _, masks_H, engine = masks_engine(place)
    log = Log(**engine.load())
    while engine.steps_done < steps:
        loss, norm = advance(engine, rows_of(engine.steps_done), masks_H)
        log.losses.append(loss)
        log.norms.append(norm)
        if engine.steps_done % 2 == 0:
            engine.save(vars(log))
    return log, masks_H.detach()


def masks(folder: Path) -> None:
    """Replicated parameters whose gradients are added up."""
    train_masks(folder / "state", steps=3)
    log, masks_H = train_masks(folder / "state")
    if int(os.environ["RANK"]) == 0:
        report(folder, log, {"masks": masks_H})


def straight(folder: Path) -> None:
    """The long run, left alone."""
    long_run(folder)


def long_run(folder: Path) -> None:
    """Six steps at stage 3 with dropout, from the newest save."""
    engine = fresh(folder / "state", 3)
    first = len(engine.load().get("losses", []))
    log = train(engine, LONG_STEPS, SAVE_EVERY)
    state = engine.full_state()
    if engine.ranks.is_main:
        report(folder, log, state, first=first)


def killed_in_a_step(folder: Path) -> None:
    """Rank 1 is killed in the fourth step's backward pass."""
    backward = DeepSpeedEngine.backward

    def deadly(self: DeepSpeedEngine, loss: Tensor) -> None:
        if self.steps_done == 3 and self.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        backward(self, loss)

    DeepSpeedEngine.backward = deadly  # type: ignore[method-assign]
    long_run(folder)


def killed_in_a_save(folder: Path) -> None:
    """Rank 1 is killed when its part of the save of step 4 is half written."""
    save = torch.save

    def deadly(state: Any, file: Any, **options: Any) -> None:
        save(state, file, **options)
        if "step-0000004" in str(file) and os.environ["RANK"] == "1":
            path = Path(file)
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = deadly
    long_run(folder)


# Those that share one launch: starting processes costs more than the work itself.
TOGETHER = (equality, one_step, not_a_number, resume, lora, masks, straight)
ALONE = (long_run, killed_in_a_step, killed_in_a_save)


def main(name: str, folder: Path) -> int:
    """Run one scenario, or all that share a launch."""
    torch.set_num_threads(1)
    # Else nothing of a tiny model would be cut into parts.
    deepspeed_engine.WHOLE_BELOW = 0
    start_processes()
    scenarios = {s.__name__: s for s in (*TOGETHER, *ALONE)}
    try:
        for scenario in TOGETHER if name == "together" else (scenarios[name],):
            place = folder / scenario.__name__ if name == "together" else folder
            scenario(place)
    except DraftsmithError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
