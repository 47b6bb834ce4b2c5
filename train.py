"""Train AOT and DeAOT models: on one device or many, from clips of any data set."""

from typing import TYPE_CHECKING, Any

from utils.cli import run

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def main(
    data_root: str,
    output_dir: str,
    datasets: list[str | dict[str, Any]],
    model: str = "aott",
    encoder: str | None = None,
    encoder_weights: str | None = None,
    freeze_encoder: bool = False,
    init: str | None = None,
    init_partial: bool = False,
    resume: str = "auto",
    total_steps: int = 100000,
    batch_size: int = 16,
    accumulation: int = 1,
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

    Args:
        data_root: Folder that the data sets lie in.
        output_dir: Gets config.yaml, metrics.csv, checkpoints/ and train.log.
        datasets: Names in configs/data or descriptions (see data/training.py).
        model: A published model (aott, r50_deaotl, ...).
        encoder: Another encoder for it: mobilenetv2, resnet50, resnet101, resnest101, swin_base or timm/<name>.
        encoder_weights: ImageNet weights of the encoder.
        freeze_encoder: Train the rest of the network only.
        init: Weights of the whole model to start from.
        init_partial: Take from --init what fits.
        resume: auto (newest whole checkpoint in output_dir), never, or a checkpoint.
        total_steps: Optimiser steps of the whole schedule.
        batch_size: Clips a step over all devices.
        accumulation: Forward and backward passes a step on each device.
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
        save_every: Steps between checkpoints.
        keep: Checkpoints kept.
        stop_after: Save and stop after so many minutes; --resume auto goes on from there.
        workers: Loader processes of each device; default by the device.
        seed: Of everything random.
        accelerator: auto, cpu, cuda or mps.
        devices: auto, a number, "0,1", [0,1] or "cuda:1".
        strategy: auto, ddp, ...
        num_nodes: Machines.
        precision: auto, 32-true, 16-mixed or bf16-mixed; mixed on CUDA only.
        debug: Show the traceback of an error.
    """
    settings = {name: value for name, value in locals().items() if name != "debug"}
    from utils.fabric import launch, make_fabric

    fabric = make_fabric(accelerator, devices, strategy, precision, num_nodes, training=True)
    launch(fabric, setup, settings)


def setup(fabric: "Fabric", settings: dict[str, Any]) -> None:
    """Build model, optimiser and data on this process, resume, and fit."""
    import time

    import torch

    from data.training import open_training_data
    from models import build_model
    from utils.checkpoint import load_encoder, load_weights
    from utils.errors import InputError
    from utils.loading import StepSampler, make_loader
    from utils.run_folder import RunFolder
    from utils.schedule import WeightAverage, parameter_groups

    started = time.monotonic()
    s = settings
    parts = fabric.world_size * s["accumulation"]
    if s["batch_size"] % parts:
        lower, upper = s["batch_size"] // parts * parts, (s["batch_size"] // parts + 1) * parts
        raise InputError(
            f"--batch_size {s['batch_size']} cannot be split over {fabric.world_size} processes with --accumulation "
            f"{s['accumulation']}: take {f'{lower} or ' if lower else ''}{upper}"
        )
    torch.manual_seed(s["seed"])
    model = build_model(s["model"], **({"encoder": s["encoder"]} if s["encoder"] else {}))
    if s["encoder_weights"]:
        load_encoder(model, s["encoder_weights"])
    if s["init"]:
        report = load_weights(model, s["init"], partial=s["init_partial"])
        fabric.print(f"{s['init']}: {report.share:.1%} of the model's values loaded")
    if s["freeze_encoder"]:
        model.encoder.requires_grad_(False)
    if s["lr_min"] is None:
        s["lr_min"] = 2e-5 if model.settings.encoder == "mobilenetv2" else 1e-5
    if s["strong_augmentation"] is None:
        s["strong_augmentation"] = model.settings.family == "deaot"
    s["crop"] = model.input_size(*(s["crop"] or (465, 465)))

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

    data = open_data(s["datasets"], s["seed"])
    validation = open_data(s["val_datasets"], s["seed"] + 1) if s["val_datasets"] else None

    average = WeightAverage(model, 1 - 1 / max(s["total_steps"] * s["ema_ratio"], 1 + 1e-9))
    raw = model  # the network itself; `model` becomes what Fabric wraps around it
    optimizer = torch.optim.AdamW(parameter_groups(model, s["weight_decay"]), lr=s["lr"])
    model, optimizer = fabric.setup(model, optimizer)
    folder = RunFolder(fabric, s["output_dir"], s, keep=s["keep"])
    average.to(fabric.device)
    state = {"model": model, "optimizer": optimizer, "step": 0, "ema": average.state_dict()}
    if folder.resume(state, s["resume"]):
        average.load_state_dict(state["ema"])
        fabric.print(f"resumed at step {state['step']}")
    if s["freeze_encoder"]:
        raw.freeze_encoder()

    share = s["batch_size"] // fabric.world_size
    fabric.print(
        f"{raw.name} with {raw.settings.encoder} on {fabric.world_size} x {fabric.device.type}, "
        f"{fabric.strategy.precision.precision}; {s['batch_size']} clips a step ({share} a process)"
    )
    steps = range(state["step"], s["total_steps"])
    sampler = StepSampler(
        len(data), s["batch_size"], steps, s["seed"], fabric.global_rank, fabric.world_size, s["accumulation"]
    )
    loader = make_loader(fabric, data, sampler, s["workers"])
    deadline = None if s["stop_after"] is None else started + 60 * s["stop_after"]
    fit(fabric, model, raw, optimizer, average, loader, validation, folder, state, s, deadline)


def fit(fabric, model, raw, optimizer, average, loader, validation, folder, state, s, deadline) -> None:
    """Run the steps that are left."""
    import time

    import torch
    from tqdm import tqdm

    from models.network import SLOTS
    from utils.loading import identity_permutations
    from utils.losses import clip_loss, frame_losses
    from utils.schedule import learning_rate, reference_weight, set_learning_rate

    batches = iter(loader)
    bar = tqdm(
        range(state["step"], s["total_steps"]),
        initial=state["step"],
        total=s["total_steps"],
        disable=fabric.global_rank != 0,
        mininterval=2,
        dynamic_ncols=True,
    )
    skipped, window = 0, time.perf_counter()
    model.train()
    for step in bar:
        sequential = step >= int(s["feed_predictions_ratio"] * s["total_steps"])
        rate = learning_rate(step, s["total_steps"], s["lr"], s["lr_min"], s["warm_up_ratio"])
        weight = reference_weight(step, s["total_steps"], ratio=s["reference_loss_ratio"])
        set_learning_rate(optimizer, rate, s["lr_min"], s["lr_encoder_ratio"], freeze_identities=sequential)
        # What is random inside the network depends on the step, so that a resumed run repeats it.
        torch.manual_seed(s["seed"] + (step + 1) * 1009 + fabric.global_rank)
        logging = (step + 1) % s["log_every"] == 0 or step + 1 == s["total_steps"]
        total, iou, names = torch.zeros((), device=fabric.device), torch.zeros((), device=fabric.device), []
        for part in range(s["accumulation"]):
            batch = next(batches)
            names += batch["names"]
            order = identity_permutations(s["seed"], batch["items"], SLOTS).to(fabric.device)
            with fabric.no_backward_sync(model, enabled=part < s["accumulation"] - 1):
                logits = model(
                    batch["frames"],
                    batch["labels"],
                    batch["num_objects"],
                    permutation=order,
                    feed_predictions=sequential,
                    reference_gradient=weight > 0,
                )
                losses = frame_losses(
                    logits, batch["labels"], batch["num_objects"], step, s["total_steps"], raw.align_corners
                )
                loss = clip_loss(losses, weight) / s["accumulation"]
                fabric.backward(loss)
            total += loss.detach()
            if logging:
                iou += batch_iou(raw, logits, batch) / s["accumulation"]
        norm = fabric.clip_gradients(model, optimizer, max_norm=s["clip_norm"], error_if_nonfinite=False)
        if torch.isfinite(norm):  # after the reduction: the same on every process
            optimizer.step()
            average.update()
            skipped = 0
        else:
            skipped += 1
            print(f"step {step}: the loss is {total.item()}, step skipped; clips: {', '.join(names)}", flush=True)
            if skipped == 5:
                raise RuntimeError("five steps in a row with a loss that is not finite: the run ends here")
        optimizer.zero_grad()
        state["step"] = step + 1

        if logging:
            values = fabric.all_reduce({"loss": total, "iou": iou}, reduce_op="mean")
            elapsed, window = time.perf_counter() - window, time.perf_counter()
            row = {
                "step": step + 1,
                "epoch": (step + 1) * s["batch_size"] / len(loader.dataset.dataset),
                "loss": values["loss"].item(),
                "iou": values["iou"].item(),
                "lr": rate,
                "grad_norm": norm.item(),
                "samples_per_s": s["log_every"] * s["batch_size"] / elapsed,
            }
            folder.log(row)
            bar.set_postfix(loss=f"{row['loss']:.3f}", iou=f"{row['iou']:.3f}")
        late = deadline is not None and time.monotonic() > deadline
        late = bool(fabric.broadcast(late)) if deadline is not None else late
        last = step + 1 == s["total_steps"] or late or folder.stop_requested
        if validation is not None and ((step + 1) % s["val_every"] == 0 or last):
            folder.log({"step": step + 1, "val_loss": validate(fabric, raw, average, validation, s)})
            window = time.perf_counter()
        if (step + 1) % s["save_every"] == 0 or last:
            state["ema"] = average.state_dict()
            folder.save(state, raw, average)
        if last:
            break


def validate(fabric, raw, average, validation, s) -> float:
    """Mean loss of the averaged weights over the validation clips, each process taking its share."""
    import torch

    from data.clips import collate
    from utils.losses import clip_loss, frame_losses

    average.swap()
    raw.eval()
    total = torch.zeros(2, device=fabric.device)
    with torch.no_grad(), fabric.autocast():
        for item in range(fabric.global_rank, s["val_clips"], fabric.world_size):
            batch = fabric.to_device(collate([validation[item]]))
            logits = raw(batch["frames"], batch["labels"], batch["num_objects"], feed_predictions=True)
            losses = frame_losses(logits, batch["labels"], batch["num_objects"], 0, 1, raw.align_corners)
            total += torch.stack((clip_loss(losses, 0.0), torch.ones((), device=fabric.device)))
    average.swap()
    raw.train()
    total = fabric.all_reduce(total, reduce_op="sum")
    return (total[0] / total[1]).item()


def batch_iou(raw, logits, batch):
    """IoU of the batch's frames after the reference."""
    import torch

    from utils.losses import training_iou

    with torch.no_grad():
        labels = batch["labels"][:, 1:]
        frames = [raw.resize(frame.float(), labels.shape[-2:]).argmax(1) for frame in logits[:, 1:].unbind(1)]
        return training_iou(torch.stack(frames, dim=1), labels, batch["num_objects"])


if __name__ == "__main__":
    run(main)
