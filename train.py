"""Train AOT and DeAOT models: on one device or many, from clips of any data set."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from utils.cli import run
from utils.errors import InputError

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from models.network import VOSNetwork


def main(
    data_root: str,
    output_dir: str,
    datasets: list[str | dict[str, Any]] | None = None,
    experiences: list[dict[str, Any]] | None = None,
    plugins: list[str | dict[str, Any]] | None = None,
    model: str | None = None,
    encoder: str | None = None,
    encoder_weights: str | None = None,
    freeze_encoder: bool = False,
    freeze: list[str] | None = None,
    ease_start: bool = False,
    identity_shuffle: bool = True,
    init: str | None = None,
    init_partial: bool = False,
    resume: str = "auto",
    total_steps: int = 100000,
    batch_size: int = 16,
    accumulation: int = 1,
    recompute: bool = False,
    crop: tuple[int, int] | None = None,
    frames: int = 5,
    short_edge: int = 480,
    scale: tuple[float, float] = (0.7, 1.3),
    merge: float | None = None,
    strong_augmentation: bool | None = None,
    cache_megabytes: float = 0,
    lr: float = 2e-4,
    lr_min: float | None = None,
    lr_encoder_ratio: float = 0.1,
    warm_up_ratio: float = 0.05,
    weight_decay: float = 0.07,
    reference_loss_ratio: float = 1.0,
    feed_predictions_ratio: float = 0.5,
    ema_ratio: float = 0.1,
    clip_norm: float = 5.0,
    val_datasets: list[str | dict[str, Any]] | None = None,
    val_clips: int = 16,
    val_every: int = 500,
    log_every: int = 20,
    picture_every: int = 1000,
    logger: Literal["csv", "wandb"] = "csv",
    save_every: int = 5000,
    keep: int = 8,
    stop_after: float | None = None,
    workers: int | None = None,
    seed: int = 0,
    accelerator: str = "auto",
    devices: int | str | list[int] = "auto",
    strategy: str = "auto",
    num_nodes: int = 1,
    precision: str = "auto",
    debug: bool = False,
) -> None:
    """Train a model by the published recipe of AOT and DeAOT.

    SIGINT, SIGTERM and SIGUSR1 save a checkpoint and stop the run; the same command goes on from there.

    Args:
        data_root: Folder that the data sets lie in.
        output_dir: Gets config.yaml, metrics.csv, checkpoints/, pictures/ and train.log.
        datasets: Names in configs/data or descriptions (see data/training.py).
        experiences: Instead of datasets: several of them, one after the other, each with its own steps or epochs, and
            how it is evaluated (see docs/CONTINUAL.md).
        plugins: Remedies against forgetting earlier experiences: naive, joint, cumulative, replay, ewc, si, lwf, gem,
            agem, or mappings of kind and options.
        model: A published model (aott, r50_deaotl, ...); default: that of --init where the file says it, else aott.
        encoder: Another encoder for it: mobilenetv2, resnet50, resnet101, resnest101, swin_base or timm/<name>.
        encoder_weights: ImageNet weights of the encoder.
        freeze_encoder: Train the rest of the network only.
        freeze: Keep also these parts as they are, by the first letters of their parameters' names (identity_bank).
        ease_start: Initialise for a training of few steps (see models/network.py).
        identity_shuffle: Give the objects of a clip random identities; a training of few steps does better without.
        init: Weights of the whole model to start from.
        init_partial: Take from --init what fits.
        resume: auto (newest whole checkpoint in output_dir), never, or a checkpoint.
        total_steps: Optimiser steps of the whole schedule; experiences have their own.
        batch_size: Clips a step over all devices.
        accumulation: Forward and backward passes a step on each device.
        recompute: Keep no activations of transformer and decoder: less memory, their forward pass done twice.
        crop: Height and width of the clips; default 465 or, for models without align_corners, 464.
        frames: Frames of a clip, the reference with them.
        short_edge: Short edge that scale 1 stands for.
        scale: Range of the random scale.
        merge: Probability of pasting a second clip over the first; default as each kind of data was published.
        strong_augmentation: Colour jitter, grey and blur of each frame; default: for DeAOT.
        cache_megabytes: Memory for decoded frames.
        lr: Peak learning rate.
        lr_min: Floor of the learning rate; default 2e-5 for mobilenetv2, else 1e-5.
        lr_encoder_ratio: The encoder's share of the rate above the floor.
        warm_up_ratio: Share of the steps with a rising rate.
        weight_decay: Of AdamW.
        reference_loss_ratio: Share of the steps over which the loss on reference frames fades out.
        feed_predictions_ratio: Share of the steps after which the model remembers its own predictions.
        ema_ratio: The weights' moving average has decay 1 - 1 / (total_steps * ema_ratio).
        clip_norm: Largest norm of the gradient.
        val_datasets: Data whose loss is logged every --val_every steps, on the same clips each time.
        val_clips: How many such clips.
        val_every: Steps between validations.
        log_every: Steps between rows of metrics.csv.
        picture_every: Steps between pictures of clips (reference, truth, prediction side by side); 0 for none.
        logger: metrics.csv is always written; wandb sends it there as well, offline where it finds no key.
        save_every: Steps between checkpoints.
        keep: Checkpoints kept.
        stop_after: Save and stop after so many minutes; --resume auto goes on from there.
        workers: Loader processes of each device; default by the device.
        seed: Of everything random.
        accelerator: auto, cpu, cuda or mps.
        devices: auto, a number, "0,1", [0,1] or "cuda:1".
        strategy: auto, ddp, ...; continual training takes ddp alone.
        num_nodes: Machines.
        precision: auto, 32-true, 16-mixed or bf16-mixed; mixed on CUDA only.
        debug: Show the traceback of an error.
    """
    settings = {name: value for name, value in locals().items() if name != "debug"}
    from utils.fabric import launch, make_fabric
    from utils.options import TRAINING, check_numbers

    check_experiences(settings)
    check_numbers(settings, TRAINING)
    fabric = make_fabric(accelerator, devices, strategy, precision, num_nodes, training=True)
    launch(fabric, setup, settings)


def setup(
    fabric: "Fabric",
    settings: dict[str, Any],
    model: "VOSNetwork | None" = None,
    on_step: Callable[[dict], object] | None = None,
    on_checkpoint: Callable[[dict], object] | None = None,
) -> dict[str, Any]:
    """Build model, optimiser and data on this process, resume, and fit.

    Args:
        settings: the options of `main`.
        model: trained in place of a new one.
        on_step: given to all processes or none; rank 0 calls it with the row of every step.
        on_checkpoint: rank 0 calls it with step, checkpoint (weights to use) and resume (for a run that goes on).

    Returns:
        The last step, and the signal that asked this process to stop, or None.
    """
    import signal
    import time
    from functools import partial

    import torch

    from data.training import open_training_data
    from models import build_model
    from utils.checkpoint import load_encoder, load_model, load_weights
    from utils.continual.stages import Stage
    from utils.fabric import end_together
    from utils.loading import BatchShare, StepSampler, make_loader
    from utils.options import TRAINING, check_numbers
    from utils.progress import Progress
    from utils.run_folder import RunFolder
    from utils.schedule import WeightAverage, parameter_groups
    from utils.stop import StopRequest
    from utils.wandb_run import without_wandb

    s = settings
    deadline = None if s["stop_after"] is None else time.monotonic() + 60 * s["stop_after"]
    end_together(fabric)
    check_experiences(s)
    check_numbers(s, TRAINING)
    check_batch(s, fabric.world_size)
    torch.manual_seed(s["seed"])
    random_weights = model is None and not (s["encoder_weights"] or s["init"])
    if model is None:
        with without_wandb():
            if s["init"] and not s["encoder"] and not s["init_partial"]:
                model = load_model(s["init"], s["model"])  # our own files know their encoder and other settings
            else:
                model = build_model(s["model"] or "aott", **({"encoder": s["encoder"]} if s["encoder"] else {}))
    s["model"] = model.name
    fill_in(s, model.settings)
    s["crop"] = model.input_size(*s["crop"])

    def open_data(datasets: list, seed: int):
        return open_training_data(
            datasets,
            s["data_root"],
            size=s["crop"],
            short_edge=s["short_edge"],
            scale=s["scale"],
            frames=s["frames"],
            strong_augmentation=s["strong_augmentation"],
            merge=s["merge"],
            cache_megabytes=s["cache_megabytes"],
            seed=seed,
        )

    plugins, evaluations = [], {}
    if s["experiences"] is None:
        data, stages = open_data(s["datasets"], s["seed"]), [Stage(0, "", 0, s["total_steps"])]
    else:
        data, stages, plugins, evaluations = open_experiences(s, open_data)
    validation = open_data(s["val_datasets"], s["seed"] + 1) if s["val_datasets"] else None

    if s["ease_start"]:
        model.ease_start()
    if s["encoder_weights"]:
        load_encoder(model, s["encoder_weights"])
    if s["init"]:
        report = load_weights(model, s["init"], partial=s["init_partial"])
        fabric.print(f"{s['init']}: {report.share:.1%} of the model's values loaded")
    if random_weights:
        fabric.print("the model starts from random weights; --encoder_weights or --init give better ones")
    if s["freeze_encoder"]:
        model.encoder.requires_grad_(False)
    for prefix in s["freeze"] or []:
        named = [parameter for name, parameter in model.named_parameters() if name.startswith(prefix)]
        if not named:
            raise InputError(f"--freeze {prefix}: the model has no parameter of that name")
        for parameter in named:
            parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(parameter_groups(model, s["weight_decay"]), lr=s["lr"])
    model, optimizer = fabric.setup(model, optimizer)
    average = WeightAverage(model.module, 0.0)  # each stage has its own decay

    folder = RunFolder(fabric, s["output_dir"], s, keep=s["keep"], wandb=s["logger"] == "wandb")
    state = {"model": model, "optimizer": optimizer, "ema": average, "step": 0}
    course = None
    if s["experiences"] is not None:
        course = state["plugins"] = make_course(fabric, model.module, data, stages, plugins, s)
        state["scores"] = {}
    folder.resume(state, s["resume"])
    if s["freeze_encoder"]:
        model.module.freeze_encoder()
    folder.say(
        f"{model.module.name} with {model.module.settings.encoder} on {fabric.world_size} x {fabric.device.type}, "
        f"{fabric.strategy.precision.precision}; {s['batch_size']} clips a step, {len(data)} an epoch; "
        f"steps {state['step']} to {s['total_steps']}"
    )
    if evaluations and state["step"] == 0:
        evaluate_experiences(state, course, evaluations, folder)
    progress = Progress(state["step"], s["total_steps"], max(100, s["val_every"]), show=fabric.global_rank == 0)
    with StopRequest(fabric, deadline) as stop:
        for stage in stages:
            if state["step"] >= stage.end:
                continue
            average.decay = 1 - 1 / max(stage.steps * s["ema_ratio"], 1 + 1e-9)
            place = (range(state["step"], stage.end), fabric.global_rank, fabric.world_size, s["accumulation"])
            if course is None:
                sampler = StepSampler(len(data), s["batch_size"], place[0], s["seed"], *place[1:])
            else:
                course.begin(stage, state["step"])
                sampler = BatchShare(course.clips, *place)
            loader = make_loader(fabric, data, sampler, s["workers"])
            end = partial(end_experience, state, course, evaluations, folder) if course is not None else None
            if fit(
                fabric, state, stage, loader, validation, folder, progress, stop, s, course, end, on_step, on_checkpoint
            ):
                break
    progress.close()
    folder.close()
    return {"step": state["step"], "signal": getattr(signal, stop.reason or "", None)}


def fill_in(s, settings) -> None:
    """Give the options that follow the model their published values."""
    if s["lr_min"] is None:
        s["lr_min"] = 2e-5 if settings.encoder == "mobilenetv2" else 1e-5
    if s["strong_augmentation"] is None:
        s["strong_augmentation"] = settings.family == "deaot"
    if s["crop"] is None:
        s["crop"] = (465, 465) if settings.align_corners else (464, 464)


def check_experiences(s) -> None:
    """Raise InputError for options that contradict each other in training through several experiences."""
    if s["experiences"] is None:
        if s["plugins"]:
            raise InputError("--plugins: they are remedies against forgetting, and need --experiences")
        if not s["datasets"]:
            raise InputError("--datasets: missing; data sets by name or description are needed, or --experiences")
        return
    if s["datasets"]:
        raise InputError("--datasets and --experiences: give one of them; each experience has data sets of its own")
    if s["strategy"] == "dp":
        raise InputError(
            "--strategy dp: its one process drives all GPUs through copies of the model, made anew in every step, "
            "that lack the frozen encoder's folded form and the models of plugins; --strategy ddp has a process for "
            "each GPU and gives the same numbers"
        )


def open_experiences(s, open_data):
    """Data, stages, plugins and benchmarks of a training through several experiences."""
    from utils.continual.plugin import make_plugins
    from utils.continual.scores import open_evaluations
    from utils.continual.stages import ClipsOfExperiences, make_stages, plan_stages, read_experiences

    experiences = read_experiences(s["experiences"])
    plugins = make_plugins(s["plugins"] or [])
    # Seeds of their own: equal items of two experiences would repeat each other's geometry otherwise.
    datasets = [open_data(x.datasets, s["seed"] + 7919 * number) for number, x in enumerate(experiences, start=1)]
    lengths = [len(dataset) for dataset in datasets]
    plans = plan_stages(experiences, lengths, s["batch_size"])
    for plugin in plugins:
        plans = plugin.plan(plans)
    stages = make_stages(plans, lengths, s["batch_size"], s["seed"])
    if s["total_steps"] not in (100000, stages[-1].end):  # the default, and what config.yaml of such a run says
        raise InputError(f"--total_steps {s['total_steps']}: the experiences make it {stages[-1].end}; leave it out")
    s["total_steps"] = stages[-1].end
    return ClipsOfExperiences(datasets), stages, plugins, open_evaluations(experiences, s["data_root"])


def make_course(fabric, model, data, stages, plugins, s):
    """What the plugins of a run get to see of it."""
    from functools import partial

    from utils.continual.course import Course, Recipe

    recipe = Recipe(partial(forward, s=s), partial(objective, s=s), partial(feeds_predictions, s=s))
    part = s["batch_size"] // fabric.world_size // s["accumulation"]
    return Course(fabric, model, data, stages, plugins, recipe, part)


def end_experience(state, course, evaluations, folder) -> dict[str, float]:
    """What an experience leaves: averaged weights, the plugins' memory of it, scores on all experiences (returned).

    The next one begins from these weights, with nothing left of the optimiser's moments.
    """
    state["ema"].restart()
    state["optimizer"].optimizer.state.clear()
    course.plugins.call("after_experience", course)
    course.check_equal()
    return evaluate_experiences(state, course, evaluations, folder) if evaluations else {}


def evaluate_experiences(state, course, evaluations, folder) -> dict[str, float]:
    """Score the weights on all experiences: a row of the matrix, and columns of metrics.csv."""
    from utils.continual.scores import START, evaluate_all, write_matrix

    name = course.stage.name if state["step"] else START
    place = folder.path / "experiences"
    state["scores"][name] = evaluate_all(course, evaluations, place / name)
    folder.say(f"after {name}: J&F " + ", ".join(f"{key} {v:.4f}" for key, v in state["scores"][name].items()))
    if course.fabric.global_rank == 0:
        write_matrix(state["scores"], list(evaluations), place)
    return {f"jf_{key}": value for key, value in state["scores"][name].items()}


def check_batch(s, processes: int) -> None:
    """Raise InputError for a batch that cannot be shared out evenly."""
    parts = processes * s["accumulation"]
    if s["batch_size"] % parts:
        lower, upper = s["batch_size"] // parts * parts, (s["batch_size"] // parts + 1) * parts
        raise InputError(
            f"--batch_size {s['batch_size']} cannot be split over {processes} processes with --accumulation "
            f"{s['accumulation']}: take {f'{lower} or ' if lower else ''}{upper}"
        )


def fit(
    fabric,
    state,
    stage,
    loader,
    validation,
    folder,
    progress,
    stop,
    s,
    course=None,
    at_end=None,
    on_step=None,
    on_checkpoint=None,
) -> bool:
    """Run the steps of a stage that are left, or up to a request to stop; whether there was one."""
    import time

    from utils.loading import batches
    from utils.plots import clip_picture

    model, total_steps = state["model"], s["total_steps"]
    stream = batches(loader)
    failures, logged, clock = 0, state["step"], time.perf_counter()
    model.train()
    for step in range(state["step"], stage.end):
        done = step + 1
        last, finished = done == total_steps, done == stage.end
        at = (step - stage.first, stage.steps)
        validating = validation is not None and (last or done % s["val_every"] == 0)
        logging = validating or finished or done % s["log_every"] == 0
        picturing = s["picture_every"] > 0 and done % s["picture_every"] == 0

        rate = set_rates(state["optimizer"], at, s)
        loss, iou, names, pictures = gradients(
            fabric, model, stream, step, at, logging or on_step, picturing, s, course
        )
        norm = update(fabric, state, s, course)
        state["step"] = done
        progress.step()

        failures = failures + 1 if step_failed(fabric, norm, loss) else 0
        if failures:
            everywhere = [name for rank in range(fabric.world_size) for name in fabric.broadcast(names, rank)]
            folder.say(f"step {done} skipped, its loss or gradient is not finite; clips: {', '.join(everywhere)}")
        if failures == 5:
            raise RuntimeError("five steps in a row with a loss or gradient that is not finite: the run ends here")
        if logging or on_step:
            means = fabric.all_reduce({"loss": loss, "iou": iou}, reduce_op="mean")
            row = {
                "step": done,
                "epoch": round((done - stage.first) * s["batch_size"] / len(loader.dataset), 4),
                "loss": means["loss"].item(),
                "iou": means["iou"].item(),
                "lr": rate,
                "grad_norm": norm.item(),
                "samples_per_s": (done - logged) * s["batch_size"] / (time.perf_counter() - clock),
            }
            if course is not None:
                row |= {"experience": stage.number + 1} | course.logged()
            if validating:
                row |= validate(fabric, state, validation, s)
            if on_step and fabric.global_rank == 0:
                on_step(row)
        if finished and at_end is not None:
            row |= at_end()
        if logging:
            folder.log(row)
            shown = "  ".join(f"{name} {value:.4g}" for name, value in row.items() if name not in ("step", "epoch"))
            folder.say(f"step {done}/{total_steps}  {shown}  {progress.eta()} left", progress.write)
            logged, clock = done, time.perf_counter()
        if picturing:
            folder.picture(clip_picture(*pictures), done)
        stopping = stop.asked() and not last
        if stopping or finished or done % s["save_every"] == 0:
            folder.save(state)
            if on_checkpoint and fabric.global_rank == 0:
                on_checkpoint(folder.files(done))
        if stopping:
            folder.say(f"stopped after step {done} ({stop.reason or 'another process was asked to'}); resume to go on")
            return True
    return False


def set_rates(optimizer, at, s) -> float:
    """Set the learning rates of a step; `at` is (step, steps) of its stage, here and below."""
    from utils.schedule import learning_rate, set_learning_rate

    rate = learning_rate(*at, s["lr"], s["lr_min"], s["warm_up_ratio"])
    set_learning_rate(optimizer, rate, s["lr_min"], s["lr_encoder_ratio"], freeze_identities=feeds_predictions(at, s))
    return rate


def feeds_predictions(at, s) -> bool:
    """Whether the model remembers its own predictions by now, in place of the truth."""
    step, steps = at
    return step >= int(s["feed_predictions_ratio"] * steps)


def forward(model, batch, at, feed_predictions=None, *, s):
    """Logits of a batch of clips, with the identities that each clip has in this run."""
    from models.network import SLOTS
    from utils.loading import identity_permutations
    from utils.schedule import reference_weight

    order = identity_permutations(s["seed"], batch["items"], SLOTS).to(batch["frames"].device)
    return model(
        batch["frames"],
        batch["labels"],
        batch["num_objects"],
        permutation=order if s["identity_shuffle"] else None,
        feed_predictions=feeds_predictions(at, s) if feed_predictions is None else feed_predictions,
        reference_gradient=reference_weight(*at, ratio=s["reference_loss_ratio"]) > 0,
        recompute=s["recompute"],
    )


def objective(model, logits, batch, at, *, s):
    """The loss that the recipe has at a step, mean over the clips of a batch."""
    from utils.losses import clip_loss, frame_losses
    from utils.schedule import reference_weight

    losses = frame_losses(logits, batch["labels"], batch["num_objects"], *at, model.align_corners)
    return clip_loss(losses, reference_weight(*at, ratio=s["reference_loss_ratio"]))


def gradients(fabric, model, stream, step, at, scoring, picturing, s, course=None):
    """Forward and backward over this process's clips of a step: loss, IoU, names of the clips, what a picture needs."""
    import numpy as np
    import torch

    total, iou, names, pictures = torch.zeros((), device=fabric.device), torch.zeros((), device=fabric.device), [], None
    if course is not None:
        course.step = step
        course.plugins.call("before_step", course)
    for part in range(s["accumulation"]):
        batch = next(stream)
        # What is random in the network (drop path, dropout) comes from here alone: a resumed run repeats it.
        seeds = np.random.SeedSequence((s["seed"], step, part, fabric.global_rank))
        torch.manual_seed(int(seeds.generate_state(1)[0]))
        with fabric.no_backward_sync(model, enabled=part < s["accumulation"] - 1):
            logits = forward(model, batch, at, s=s)
            loss = objective(model.module, logits, batch, at, s=s) / s["accumulation"]
            more = course.plugins.call("loss", course, batch, logits) if course is not None else []
            fabric.backward(loss + sum(more) / s["accumulation"])
        total = total + loss.detach()
        names += batch["names"]
        if scoring or picturing:
            predicted, part_iou = score(model.module, logits, batch)
            iou += part_iou / s["accumulation"]
            shown = (batch["frames"], batch["labels"], predicted)
            pictures = [x.cpu().numpy() for x in shown] if picturing else None
    return total, iou, names, pictures


def update(fabric, state, s, course=None):
    """One step of optimiser and average, unless the gradient is not finite; its norm before clipping."""
    import torch

    model, optimizer = state["model"], state["optimizer"]
    if course is None:
        norm = fabric.clip_gradients(model, optimizer, max_norm=s["clip_norm"], error_if_nonfinite=False)
    else:  # what plugins read and change is the gradient itself, reduced and without a scaler's factor
        fabric.strategy.precision.unscale_gradients(optimizer.optimizer)
        parameters = [parameter for parameter in model.module.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        if torch.isfinite(norm):
            for hook in ("read_gradient", "penalty", "project"):
                course.plugins.call(hook, course)
            norm = torch.nn.utils.clip_grad_norm_(parameters, s["clip_norm"])
    finite = torch.isfinite(norm)  # after the reduction: the same on every process
    if finite or scaler_of(fabric) is not None:  # a scaler leaves the step out itself, and learns from it
        optimizer.step()
    if finite:
        if course is not None:
            course.plugins.call("after_step", course)
        state["ema"].update()
    optimizer.zero_grad()
    return norm


def step_failed(fabric, norm, loss) -> bool:
    """Whether a step was skipped for a reason that counts; that a scaler's factor was too large does not."""
    import torch

    if torch.isfinite(norm):
        return False
    return scaler_of(fabric) is None or not torch.isfinite(fabric.all_gather(loss)).all()


def scaler_of(fabric):
    """The gradient scaler of 16-mixed, None in other precisions."""
    return getattr(fabric.strategy.precision, "scaler", None)


def validate(fabric, state, validation, s) -> dict[str, float]:
    """Mean loss and IoU of the averaged weights over the validation clips, each process taking its share."""
    import torch

    from data.clips import collate
    from utils.losses import clip_loss, frame_losses

    raw, average = state["model"].module, state["ema"]
    average.swap()
    raw.eval()
    total = torch.zeros(3, device=fabric.device)
    with torch.no_grad(), fabric.autocast():
        for item in range(fabric.global_rank, s["val_clips"], fabric.world_size):
            batch = fabric.to_device(collate([validation[item]]))
            logits = raw(batch["frames"], batch["labels"], batch["num_objects"], feed_predictions=True)
            losses = frame_losses(logits, batch["labels"], batch["num_objects"], 0, 1, raw.align_corners)
            _, iou = score(raw, logits, batch)
            total += torch.stack((clip_loss(losses, 0.0), iou, torch.ones_like(iou))).float()
    average.swap()
    raw.train()
    loss, iou, count = fabric.all_reduce(total, reduce_op="sum").tolist()
    return {"val_loss": loss / count, "val_iou": iou / count}


def score(raw, logits, batch):
    """Predicted labels (b, t - 1, h, w) of the frames after the reference, and their IoU with the truth."""
    import torch

    from utils.losses import training_iou

    with torch.no_grad():
        labels = batch["labels"][:, 1:]
        frames = [raw.resize(frame.float(), labels.shape[-2:]).argmax(1) for frame in logits[:, 1:].unbind(1)]
        predicted = torch.stack(frames, dim=1)
        return predicted, training_iou(predicted, labels, batch["num_objects"])


if __name__ == "__main__":
    run(main)
