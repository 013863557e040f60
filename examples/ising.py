"""The ground state of an Ising chain in a tilted field, found with gradients of complex amplitudes.

    python examples/ising.py

A ring of n spins with the Hamiltonian

    H = -J sum_i Z_i Z_{i+1} - sum_i (hx X_i + hy Y_i)

(P. Pfeuty, Annals of Physics 57, 1970, has hy = 0). X, Y and Z are Pauli's matrices; Y is imaginary, so H is complex. A
state has 2^n complex amplitudes psi, and the energy

    E(psi) = <psi| H |psi> / <psi|psi>

is least in the ground state. E is a real function of complex numbers: `backward()` gives dE/dx + i dE/dy, the
direction of steepest ascent, which must be 2 (H - E) psi / <psi|psi>. The program

1. compares that gradient with the formula, and a directional derivative with finite differences,
2. descends to the ground state, one captured step an iteration, H applied spin by spin and never made as a matrix,
3. compares energy and amplitudes with exact diagonalization (`linalg.eigh` of the matrix, 2^n x 2^n),
4. differentiates the exact energy by the field, through the eigenvalues: the magnetization (Hellmann and Feynman).
"""

import argparse

import numpy as np

import polyreme as paddle

PAULI = {
    "X": np.array([[0, 1], [1, 0]], complex),
    "Y": np.array([[0, -1j], [1j, 0]]),
    "Z": np.array([[1, 0], [0, -1]], complex),
}


class Chain:
    """H of a ring of n spins; J, hx and hy are Tensors or numbers."""

    def __init__(self, n, J=1.0, hx=0.9, hy=0.6):
        self.n, self.J, self.hx, self.hy = n, J, hx, hy
        up = 1 - 2 * (np.arange(2**n)[:, None] >> np.arange(n)[::-1] & 1)  # Z of each spin in each basis state
        self.aligned = paddle.to_tensor((up * np.roll(up, -1, 1)).sum(1).reshape([2] * n).astype(complex))
        # Y flips a spin with the factor i from up to down and -i from down to up
        self.phase = paddle.to_tensor(np.array([-1j, 1j]))

    def apply(self, psi):
        """H psi, for amplitudes [2, 2, ..., 2], one dim a spin."""
        out = -self.J * self.aligned * psi
        for spin in range(self.n):
            flipped = psi.flip([spin])
            phase = self.phase.reshape([2 if dim == spin else 1 for dim in range(self.n)])
            out = out - self.hx * flipped - self.hy * phase * flipped
        return out

    def energy(self, psi):
        """<psi| H |psi> / <psi|psi>."""
        return (psi.conj() * self.apply(psi)).real().sum() / (psi.conj() * psi).real().sum()

    def matrix(self):
        """H as a matrix [2^n, 2^n]; its gradient goes to J, hx and hy."""
        total = 0.0
        for spin in range(self.n):
            total = total - self.J * self._product({spin: "Z", (spin + 1) % self.n: "Z"})
            total = total - self.hx * self._product({spin: "X"}) - self.hy * self._product({spin: "Y"})
        return total

    def _product(self, factors):
        """The product of Pauli matrices on the spins named, ones on the others."""
        matrix = np.ones((1, 1))
        for spin in range(self.n):
            matrix = np.kron(matrix, PAULI[factors[spin]] if spin in factors else np.eye(2))
        return paddle.to_tensor(matrix)


def random_state(n, seed=0):
    """Random amplitudes of norm 1."""
    rng = np.random.default_rng(seed)
    psi = rng.standard_normal([2] * n) + 1j * rng.standard_normal([2] * n)
    return psi / np.linalg.norm(psi)


def gradient_errors(n=4):
    """Relative errors of the gradient of E: against 2 (H - E) psi / <psi|psi>, and of one slope against differences."""
    chain, at = Chain(n), random_state(n)
    psi = paddle.to_tensor(at, stop_gradient=False)
    energy = chain.energy(psi)
    energy.backward()
    gradient = psi.grad.numpy()
    want = 2 * (chain.apply(psi) - energy * psi).numpy() / np.sum(np.abs(at) ** 2)
    direction, small = random_state(n, seed=1), 1e-5
    ends = [float(chain.energy(paddle.to_tensor(at + sign * small * direction))) for sign in (1, -1)]
    slope = np.sum(np.conj(gradient) * direction).real
    return np.abs(gradient - want).max() / np.abs(want).max(), abs(slope / ((ends[0] - ends[1]) / (2 * small)) - 1)


def ground_state(chain, iterations=250):
    """(energy, normalized amplitudes) by descent from a random state; prints the energy."""
    start = paddle.nn.initializer.Assign(random_state(chain.n))
    psi = paddle.create_parameter([2] * chain.n, "complex128", default_initializer=start)
    descent = paddle.optimizer.Momentum(0.02, 0.9, parameters=[psi])

    @paddle.jit.to_static
    def step():
        energy = chain.energy(psi)
        energy.backward()
        descent.step()
        descent.clear_grad()
        psi.set_value(psi / paddle.linalg.norm(psi))  # E does not depend on the norm, the length of a step does
        return energy

    for i in range(iterations):
        energy = step()
        if i % 50 == 0:
            print(f"  iteration {i:3d}: energy {float(energy):.10f}")
    found = psi.detach()
    return float(chain.energy(found)), found / paddle.linalg.norm(found)


def compare(n=8):
    """(energy error, lost overlap) of the state found, against exact diagonalization."""
    chain = Chain(n)
    energy, psi = ground_state(chain)
    values, vectors = paddle.linalg.eigh(chain.matrix())
    overlap = (vectors[:, 0].conj() * psi.flatten()).sum().abs()  # the phase of a state is free
    print(f"  found {energy:.10f}, exact {float(values[0]):.10f}, overlap {float(overlap):.10f}")
    return energy - float(values[0]), 1 - float(overlap)


def magnetization_error(n=6):
    """Difference of dE/dhx, through the eigenvalues, and -<X> summed over the spins of the ground state."""
    hx = paddle.to_tensor(0.9, dtype="float64", stop_gradient=False)
    chain = Chain(n, hx=hx)
    matrix = chain.matrix()
    paddle.linalg.eigvalsh(matrix)[0].backward()
    ground = paddle.linalg.eigh(matrix.detach())[1][:, 0].reshape([2] * n)
    magnetization = sum(float((ground.conj() * ground.flip([spin])).sum().real()) for spin in range(n))
    print(f"  dE/dhx {float(hx.grad):.10f}, magnetization {magnetization:.10f}")
    return abs(float(hx.grad) + magnetization)


def main():
    """Check the gradient, descend, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spins", type=int, default=8)
    n = parser.parse_args().spins
    print("gradient: relative error {:.1e}, slope against finite differences {:.1e}".format(*gradient_errors()))
    print(f"descent over 2^{n} amplitudes:")
    compare(n)
    print("magnetization of 6 spins:")
    magnetization_error()


if __name__ == "__main__":
    main()
