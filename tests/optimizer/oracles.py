"""What each optimizer should compute: optax where it agrees with the paper, else NumPy written after the paper.

A run takes initial parameters (a list of float64 arrays) and one list of gradients per step -> parameters at the end.
"""

import jax.numpy as jnp
import numpy as np
import optax


def with_optax(transform):
    def run(params, steps):
        params = [jnp.asarray(p) for p in params]
        opt_state = transform.init(params)
        for grads in steps:
            updates, opt_state = transform.update([jnp.asarray(g) for g in grads], opt_state, params)
            params = optax.apply_updates(params, updates)
        return [np.asarray(p) for p in params]

    return run


def with_numpy(rule):
    """rule(p, g, s, t) -> new p; s is a dict that lives as long as the parameter, t counts from 1."""

    def run(params, steps):
        params, states = [np.asarray(p) for p in params], [{} for _ in params]
        for t, grads in enumerate(steps, 1):
            params = [rule(p, g, s, t) for p, g, s in zip(params, grads, states, strict=True)]
        return params

    return run


def momentum(lr, mu, nesterov=False, scale=1.0, decay=0.0):
    def rule(p, g, s, t):
        g = g * scale + decay * p
        s["v"] = mu * s.get("v", 0) + g
        return p - lr * (g + mu * s["v"] if nesterov else s["v"])

    return rule


def amsgrad(lr, b1, b2, eps):
    # arXiv:1904.09237 takes the maximum before the bias correction; optax takes it after
    def rule(p, g, s, t):
        s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
        s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
        s["top"] = np.maximum(s.get("top", 0), s["v"])
        return p - lr * s["m"] / (1 - b1**t) / (np.sqrt(s["top"] / (1 - b2**t)) + eps)

    return rule


def adamax(lr, b1, b2, eps):
    # arXiv:1412.6980, algorithm 2; optax adds epsilon to |g|, Paddle to beta2 u
    def rule(p, g, s, t):
        s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
        s["u"] = np.maximum(np.abs(g), b2 * s.get("u", 0) + eps)
        return p - lr / (1 - b1**t) * s["m"] / s["u"]

    return rule


def adagrad(lr, eps, start=0.0):
    # optax puts epsilon inside the root and takes a zero step at 0
    def rule(p, g, s, t):
        s["s"] = s.get("s", start) + g * g
        return p - lr * g / (np.sqrt(s["s"]) + eps)

    return rule


def lamb(lr, b1, b2, eps, decay, adapt):
    # arXiv:1904.00962, algorithm 2, without decay; optax adapts always
    def rule(p, g, s, t):
        s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
        s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
        r = s["m"] / (1 - b1**t) / (np.sqrt(s["v"] / (1 - b2**t)) + eps) + decay * p
        ratio = np.linalg.norm(p) / np.linalg.norm(r) if adapt or decay else 1.0
        return p - lr * ratio * r

    return rule


def asgd(lr, count):
    # Schmidt, Le Roux and Bach (2017), algorithm 1, batches in turn
    def rule(p, g, s, t):
        y = s.setdefault("y", [0] * count)
        at = (t - 1) % count
        s["d"] = s.get("d", 0) - y[at] + g
        y[at] = g
        return p - lr * s["d"] / min(t, count)

    return rule


def nadam(lr, b1, b2, eps, decay):
    # Dozat (2016), algorithm 8; PaddlePaddle 3.3.1 and PyTorch compute the same
    def mu(t):
        return b1 * (1 - 0.5 * 0.96 ** (t * decay))

    def rule(p, g, s, t):
        s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
        s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
        s["product"] = s.get("product", 1) * mu(t)
        ahead = mu(t + 1) * s["m"] / (1 - s["product"] * mu(t + 1)) + (1 - mu(t)) * g / (1 - s["product"])
        return p - lr * ahead / (np.sqrt(s["v"] / (1 - b2**t)) + eps)

    return rule


def radam(lr, b1, b2, eps):
    # arXiv:1908.03265, algorithm 2, with epsilon beside sqrt(v) as in PaddlePaddle; optax has it beside sqrt(v^)
    def rule(p, g, s, t):
        s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
        s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
        longest = 2 / (1 - b2) - 1
        rho = longest - 2 * t * b2**t / (1 - b2**t)
        m_hat = s["m"] / (1 - b1**t)
        if rho <= 5:
            return p - lr * m_hat
        r = np.sqrt((rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho))
        return p - lr * m_hat * r * np.sqrt(1 - b2**t) / (np.sqrt(s["v"]) + eps)

    return rule


def rprop(lr, bounds, etas):
    # Riedmiller and Braun (1993), without taking a step back where the sign has turned
    def rule(p, g, s, t):
        agreement = s.get("last", 0) * g
        rate = s.get("rate", np.full(g.shape, lr))
        rate = np.where(agreement > 0, np.minimum(rate * etas[1], bounds[1]), rate)
        s["rate"] = np.where(agreement < 0, np.maximum(rate * etas[0], bounds[0]), rate)
        s["last"] = np.where(agreement < 0, 0, g)
        return p - np.sign(s["last"]) * s["rate"]

    return rule
