"""What may follow Muon: candidates from modded-nanogpt's optimizer track, each alone or several, for one GPU.

    python -m dev.candidates normuon --optimizer muon --max_steps 1090 --total_batch_size 131072
    python -m dev.candidates nesterov=0.3,average=0.4 --optimizer muon --run_name both

Trains as train_gpt2.py, with its flags. Checkpoints hold no state of the candidates, so such a run cannot be resumed or
rolled back.
What a candidate gains against tuned Muon, from paired seeds, is in dev/LOG.md; one that pays moves to optim/muon.py.
"""

import common.interrupt  # noqa: F401  first: Ctrl-C during the other imports

import math
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

import train_gpt2
from common.errors import UserError, run
from optim import optimizer as optimizers
from optim import schedules
from optim.muon import MOMENTUM, Muon, orthogonalize_parts, update_momentum

# {name: (the value with the name alone, what it is)}
CANDIDATES = {
    "nesterov": (0.3, "EMA-Nesterov (arXiv 2605.25395): every step also goes this share of the updates' running mean"),
    "average": (0.8, "at the end four shares, up to this one, of the weights' running mean are evaluated"),
    "normuon": (0.95, "NorMuon (arXiv 2510.05491): rows of an update divided by the root of their mean square"),
    "rows": (1.0, "after Muown (arXiv 2605.10797): rows as length, by Adam, times direction, by Muon without decay"),
    "cautious": (1.0, "cautious weight decay (arXiv 2510.12402): only where the update has the weight's sign"),
    "power": (1.2, "the learning rate's decay to this power"),
    "cooldown": (0.8, "the matrices' learning rate decays over this share of the steps"),
    "momentum": (0.85, "momentum rises from this value to Muon's over the first tenth of the steps"),
    "heads": (1.0, "q, k and v are orthogonalized for each head apart"),
    "projections": (0.5, "the learning rate of the MLP's second matrix, times this"),
    "zero": (0.0, "the first weights of the matrices that end in the residual stream, times this"),
    "embedding": (2.0, "AdamW's learning rate for tokens and head, times this"),
    "embedding_decay": (0.0, "AdamW's weight decay for tokens and head, times this"),
    "positions": (2.0, "AdamW's learning rate for positions, times this"),
    "vectors": (4.0, "AdamW's learning rate for biases and LayerNorms, times this"),
    "vectors_beta2": (0.99, "AdamW's beta2 for biases and LayerNorms"),
}
HORIZON = 0.069  # share of all steps that the running mean of average is over
ACTIVE = (0.1, 0.85)  # shares of the steps between which nesterov is active
MEAN = 0.99  # decay of the updates' running mean


class Screened(Muon):
    """Muon with candidates, for whole matrices on one rank."""

    def begin(self, chosen, config):
        """Instead of __init__, for the Muon that make() turns into this. chosen: {name: value} of CANDIDATES."""
        self.chosen, self.config, self.steps = chosen, config, 0
        self.own = {}  # {(name, parameter): tensor}
        if "nesterov" in chosen:
            for group in self.param_groups:
                self.own |= {("place", weight): weight.detach().clone() for weight in group["params"]}

    def keep(self, name, parameter, first=None):
        """A tensor of a candidate's state. first: its first value; None: zeros in the parameter's shape."""
        if (name, parameter) not in self.own:
            self.own[name, parameter] = torch.zeros_like(parameter) if first is None else first.clone()
        return self.own[name, parameter]

    @torch.no_grad()
    def step(self, closure=None):
        chosen, progress = self.chosen, self.steps / self.config.max_steps
        self.steps += 1
        if self.found_inf.item() or self.matrices[0]["params"][0].grad is None:  # as Muon, but the host waits
            return
        if "momentum" in chosen:
            low = chosen["momentum"]
            for group in self.matrices:
                group["momentum"] = low + (MOMENTUM - low) * min(1.0, progress / 0.1)
        if "cooldown" in chosen:
            later = replace(self.config, cooldown_ratio=chosen["cooldown"])
            for group in self.matrices:
                group["lr"] = schedules.learning_rate(self.steps - 1, later, group["peak"])
        if self.defaults["fused"]:
            self.adamw.found_inf = self.found_inf
        self.adamw.step()
        for group in self.matrices:
            self.step_matrices(group)
        weights = [weight for group in self.param_groups for weight in group["params"]]
        if "nesterov" in chosen:  # the next gradient is that of the place to which the mean leads
            share = chosen["nesterov"] * self.matrices[0]["lr"] / self.matrices[0]["peak"]
            for weight in weights:
                place, mean = self.own["place", weight], self.keep("mean", weight)
                mean.lerp_(weight - place, 1 - MEAN)
                place.copy_(weight)
                if ACTIVE[0] <= progress < ACTIVE[1]:
                    weight.add_(mean, alpha=share)
        horizon = max(2, round(HORIZON * self.config.max_steps))
        if "average" in chosen and self.steps > self.config.max_steps - 4 * horizon:
            for weight in weights:
                self.keep("average", weight, weight).lerp_(weight, 1 / horizon)

    @torch.no_grad()
    def blend(self, share):
        """The last weights with this share of their running mean."""
        for group in self.param_groups:
            for weight in group["params"]:
                last = self.keep("last", weight, weight)
                weight.copy_(last.lerp(self.own["average", weight], share))

    def step_matrices(self, group):
        weights, parts, lr = group["params"], group["parts"], group["lr"]
        gradients = [weight.grad for weight in weights]
        if "rows" in self.chosen:
            gradients = [self.split_rows(weight) for weight in weights]
        directions = weights[0].new_empty(len(weights), *weights[0].shape, dtype=torch.bfloat16)
        for weight, gradient, direction in zip(weights, gradients, directions):
            momentum = self.state[weight]["momentum_buffer"]
            update_momentum(gradient, momentum, direction, self.found_inf > 0, group["momentum"])
        updates = orthogonalize_parts(directions, parts).float()
        if "normuon" in self.chosen:
            squares = updates.square().mean(dim=2, keepdim=True)  # (matrices, rows, 1)
            mean = self.keep("squares", weights[0], 0 * squares)
            mean.lerp_(squares, 1 - self.chosen["normuon"])
            norm = updates.norm(dim=(1, 2), keepdim=True)
            updates = updates / (mean / (1 - self.chosen["normuon"] ** self.steps)).sqrt().clamp(min=1e-10)
            updates *= norm / updates.norm(dim=(1, 2), keepdim=True).clamp(min=1e-10)  # zeros stay zeros
        rate = lr * 0.2 * math.sqrt(max(weights[0].size(0) // parts, weights[0].size(1)))
        for weight, update in zip(weights, updates):
            if "rows" in self.chosen:
                self.join_rows(weight, update * rate, lr)
                continue
            decay = weight * (lr * group["weight_decay"])
            if "cautious" in self.chosen:
                decay *= update * weight > 0
            weight.sub_(decay + update * rate)

    def split_rows(self, weight):
        """The gradient of the rows' directions, vectors of one length; that of the lengths goes into the state."""
        length = weight.norm(dim=1, keepdim=True).clamp(min=1e-12)  # (rows, 1)
        unit = weight / length
        self.own["along", weight] = along = (weight.grad * unit).sum(dim=1, keepdim=True)
        return (weight.grad - along * unit) * length / direction_length(weight)

    def join_rows(self, weight, update, lr):
        """Move the rows' directions by Muon's update and their lengths by Adam's."""
        length, along = weight.norm(dim=1, keepdim=True).clamp(min=1e-12), self.own["along", weight]
        mean = self.keep("mean_along", weight, 0 * along).lerp_(along, 0.1)
        square = self.keep("square_along", weight, 0 * along).lerp_(along.square(), 0.05)
        mean, square = mean / (1 - 0.9**self.steps), square / (1 - 0.95**self.steps)
        direction = weight / length * direction_length(weight) - update
        length = length - lr * mean / (square.sqrt() + 1e-8)
        weight.copy_(direction / direction.norm(dim=1, keepdim=True).clamp(min=1e-12) * length)


Screened.step = torch.optim.Optimizer.profile_hook_step(Screened.step)  # for hooks, as those of --fp8


def direction_length(weight):
    """Of a row of a matrix as GPT-2 draws most of them, with a standard deviation of 0.02."""
    return 0.02 * math.sqrt(weight.size(1))


def make(chosen, model, config):
    """As optim.optimizer.make_optimizer, with candidates."""
    result = optimizers.make_muon(model, config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in result.matrices:
        name = names[group["params"][0]]
        if name.endswith("mlp.c_proj.weight"):
            group["peak"] *= chosen.get("projections", 1.0)
        if "heads" in chosen and name.endswith("c_attn.weight"):
            group["parts"] *= model.config.n_head
    for parameter, name in names.items():
        if "zero" in chosen and name.endswith("c_proj.weight"):
            parameter.data *= chosen["zero"]
    groups, result.adamw.param_groups = result.adamw.param_groups, []
    for group in groups:
        for parameter in group["params"]:
            name = names[parameter]
            kind = "embedding" if "wte" in name else "positions" if "wpe" in name else "vectors"
            own = dict(group, params=[parameter], peak=group["peak"] * chosen.get(kind, 1.0))
            own["weight_decay"] *= chosen.get(f"{kind}_decay", 1.0)
            if kind == "vectors":
                own["betas"] = (0.9, chosen.get("vectors_beta2", config.beta2))
            result.adamw.param_groups.append(own)
    result.param_groups = [*result.matrices, *result.adamw.param_groups]
    optimizers.allocate_state(result)
    result.__class__ = Screened
    result.begin(chosen, config)
    return result


def choose(text):
    """ "normuon,average=0.5" as {name: value}. "none": Muon as it is. Raises UserError for a bad name or value."""
    chosen = {}
    for part in text.split(",") if text != "none" else ():
        name, _, value = part.partition("=")
        if name not in CANDIDATES:
            raise UserError(f"there is no candidate {name!r}; there are none, {', '.join(CANDIDATES)}")
        try:
            chosen[name] = float(value) if value else CANDIDATES[name][0]
        except ValueError as error:
            raise UserError(f"{part}: not a number") from error
    return chosen


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        lines = [f"  {name:14} {what}; alone: {value:g}" for name, (value, what) in CANDIDATES.items()]
        print(__doc__ + "\n" + "\n".join(lines))
        return
    chosen = choose(sys.argv.pop(1))

    def make_optimizer(model, config):
        if config.optimizer != "muon" or dist.is_initialized():
            raise UserError("candidates need --optimizer muon, on one GPU")
        return make(chosen, model, config)

    def set_learning_rates(optimizer, step, config):
        if step != optimizer.steps:
            raise UserError(f"candidates begin at step 0, and this is step {step}: use another --run_name")
        return schedules.set_learning_rates(optimizer, step, config)

    evaluate = train_gpt2.evaluate_if_due

    def evaluate_if_due(run, stop):
        evaluate(run, stop)
        if "average" in chosen and run.step == run.trainer.config.max_steps:
            for quarters in (1, 2, 3, 4):
                run.trainer.optimizer.blend(chosen["average"] * quarters / 4)
                evaluate(run, stop)

    train_gpt2.make_optimizer, train_gpt2.set_learning_rates = make_optimizer, set_learning_rates
    train_gpt2.evaluate_if_due = evaluate_if_due
    scheduled = schedules.learning_rate

    def learning_rate(step, config, peak):
        rate = scheduled(step, config, peak)
        if "power" in chosen and step >= config.warmup_steps:
            rate = peak * (rate / peak) ** chosen["power"]
        return rate

    schedules.learning_rate = learning_rate
    train_gpt2.main()


if __name__ == "__main__":
    run(main)
