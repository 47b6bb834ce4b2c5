"""Learning rates, parameter groups, the weight of the reference frame's loss and the moving average of weights."""

import math

import torch
from torch import Tensor, nn

NO_DECAY = ("relative_position_bias_table", "relative_emb_v", "conv_out")


def learning_rate(
    step: int,
    total_steps: int,
    base: float,
    minimum: float,
    warm_up_ratio: float = 0.05,
    power: float = 0.9,
    cosine: bool = False,
    restarts: int = 1,
) -> float:
    """Linear warm-up from `minimum` to `base`, then polynomial (or cosine) decay; all of it `restarts` times."""
    cycle = total_steps / restarts
    warm_up = warm_up_ratio * cycle
    step = step if restarts == 1 else int(step % cycle)
    if step < warm_up:
        return minimum + (base - minimum) * step / warm_up
    progress = min(1.0, (step - warm_up) / (cycle - warm_up + 1))
    left = (1 + math.cos(math.pi * progress)) / 2 if cosine else (1 - progress) ** power
    return minimum + (base - minimum) * left


def reference_weight(step: int, total_steps: int, start: float = 1.0, ratio: float = 1.0) -> float:
    """Weight of the loss on the reference frame: from `start` to 0 over `ratio` of the steps."""
    end = total_steps * ratio + 1e-5
    return start * max(end - step, 0.0) / end


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Groups for AdamW: with and without decay (biases, norms and NO_DECAY), encoder and identity bank apart."""
    groups: dict[tuple[str, bool], dict] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        part = name.split(".")[0]
        part = part if part in ("encoder", "identity_bank") else "rest"
        decays = parameter.ndim > 1 and not any(word in name for word in NO_DECAY)
        group = groups.setdefault(
            (part, decays), {"params": [], "part": part, "weight_decay": weight_decay if decays else 0.0}
        )
        group["params"].append(parameter)
    return list(groups.values())


def set_learning_rate(
    optimizer: torch.optim.Optimizer, rate: float, minimum: float, encoder_ratio: float, freeze_identities: bool
) -> None:
    """Give every group its rate; in sequential training the identity bank neither learns nor decays."""
    for group in optimizer.param_groups:
        if group["part"] == "encoder":
            group["lr"] = minimum + (rate - minimum) * encoder_ratio
        elif group["part"] == "identity_bank" and freeze_identities:
            group.setdefault("decay_when_learning", group["weight_decay"])  # of use where a schedule starts anew
            group["lr"] = group["weight_decay"] = 0.0
        else:
            group["lr"] = rate
            group["weight_decay"] = group.pop("decay_when_learning", group["weight_decay"])


class WeightAverage:
    """Exponential moving average of the trainable parameters.

    The decay of update n is min(decay, (1 + n) / (10 + n)).

    Args:
        model: its parameters are copied as the start.
        decay: of the long run.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self.updates = decay, 0
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.shadow = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(
            list(self.shadow.values()), [p.detach() for p in self._parameters.values()], 1 - decay
        )

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew from the averaged weights, which become the model's."""
        self.updates = 0
        for name, parameter in self._parameters.items():
            parameter.copy_(self.shadow[name])

    def state_dict(self) -> dict[str, int | dict[str, Tensor]]:
        return {"updates": self.updates, "shadow": self.shadow}

    def load_state_dict(self, state: dict) -> None:
        self.updates = state["updates"]
        for name, tensor in state["shadow"].items():
            self.shadow[name].copy_(tensor)

    def swap(self) -> None:
        """Exchange the model's weights and the averaged ones; twice restores both."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                kept = parameter.detach().clone()
                parameter.copy_(self.shadow[name])
                self.shadow[name].copy_(kept)
