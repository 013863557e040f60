"""Flow in a periodic square by a spectral method, differentiated through its Fourier transforms.

    python examples/navier_stokes.py

The vorticity w of a flow in two dimensions, of viscosity nu, follows

    dw/dt + u dw/dx + v dw/dy = nu laplacian(w),    u = d(psi)/dy,  v = -d(psi)/dx,  laplacian(psi) = -w

In Fourier space derivatives are products with i k, and viscosity is the factor exp(-nu k^2 t), which is exact; the
products u dw/dx + v dw/dy are taken in space, without the upper third of the frequencies, whose products would appear
as lower ones (S. Orszag, J. Atmos. Sci. 28, 1971). Time steps are Heun's, second order, around the exact factor.

`advance` is one step and is captured: compiled once, forward and backward. A simulation is a loop over it, and
`backward()` goes back through all steps. The program

1. compares the decay of a Taylor-Green vortex with the exact one,
2. compares a directional derivative through 20 steps with finite differences,
3. finds the viscosity of a flow from what it looked like before and after, by gradient descent,
4. finds a flow's beginning from its end: 1,024 unknowns.
"""

import argparse
import math

import polyreme as paddle


class Flow:
    """Steps of `dt` on n x n points of the square [0, 2 pi]^2; a state is rfft2 of the vorticity."""

    def __init__(self, n, dt, dtype="float64"):
        self.n, self.dt = n, dt
        self.kx = paddle.fft.fftfreq(n, 1 / n, dtype=dtype).unsqueeze(1)
        self.ky = paddle.fft.rfftfreq(n, 1 / n, dtype=dtype)
        self.k2 = self.kx**2 + self.ky**2
        self.kept = ((self.kx.abs() < n / 3) & (self.ky.abs() < n / 3)).astype(dtype)
        self.advance = paddle.jit.to_static(self.step)

    def velocity(self, state):
        """(u, v) in space."""
        stream = state / self.k2.clip(min=1.0)  # the mean of the stream function is free
        return paddle.fft.irfft2(1j * self.ky * stream), paddle.fft.irfft2(-1j * self.kx * stream)

    def carried(self, state):
        """The change of the state by the flow carrying it along."""
        u, v = self.velocity(state)
        along = u * paddle.fft.irfft2(1j * self.kx * state) + v * paddle.fft.irfft2(1j * self.ky * state)
        return -self.kept * paddle.fft.rfft2(along)

    def step(self, state, viscosity):
        """The state dt later."""
        decay = paddle.exp(-viscosity * self.k2 * self.dt)
        slope = self.carried(state)
        guess = decay * (state + self.dt * slope)
        return decay * (state + 0.5 * self.dt * slope) + 0.5 * self.dt * self.carried(guess)

    def run(self, vorticity, viscosity, steps):
        """The vorticity `steps` steps later."""
        state = paddle.fft.rfft2(vorticity)
        for _ in range(steps):
            state = self.advance(state, viscosity)
        return paddle.fft.irfft2(state)

    def energy(self, vorticity):
        """Mean of (u^2 + v^2) / 2."""
        u, v = self.velocity(paddle.fft.rfft2(vorticity))
        return 0.5 * (u * u + v * v).mean()


def points(n):
    """The coordinates x and y of n x n points."""
    line = paddle.arange(n, dtype="float64") * (2 * math.pi / n)
    return paddle.meshgrid(line, line)


def eddies(n):
    """A smooth flow of several eddies."""
    x, y = points(n)
    return paddle.sin(x) * paddle.cos(2 * y) + 0.7 * paddle.cos(2 * x + y) + 0.5 * paddle.sin(3 * x - 2 * y)


def vortex_error(n=32, steps=20, dt=0.02, viscosity=0.1):
    """Largest relative error of energy and vorticity of a Taylor-Green vortex, which decays as exp(-2 nu t)."""
    flow = Flow(n, dt)
    x, y = points(n)
    start = 2 * paddle.cos(x) * paddle.cos(y)
    end = flow.run(start, paddle.to_tensor(viscosity, dtype="float64"), steps)
    decay = math.exp(-2 * viscosity * dt * steps)
    energy = flow.energy(end) / flow.energy(start) / decay**2 - 1
    return max(abs(float(energy)), float((end - decay * start).abs().max()) / (2 * decay))


def gradient_error(n=32, steps=20, dt=0.02):
    """Relative difference of the slope of a loss along one direction: by backward(), and by finite differences."""
    flow, start = Flow(n, dt), eddies(n)
    viscosity = paddle.to_tensor(0.05, dtype="float64")
    paddle.seed(0)
    direction = paddle.randn([n, n], dtype="float64")

    def loss(vorticity):
        return (flow.run(vorticity, viscosity, steps) ** 3).mean()

    start.stop_gradient = False
    loss(start).backward()
    slope = float((start.grad * direction).sum())
    small = 1e-5  # of a third derivative near 1, its square is lost; rounding costs 1e-16 / 1e-5
    ends = [float(loss(start.detach() + sign * small * direction)) for sign in (1, -1)]
    return abs(slope / ((ends[0] - ends[1]) / (2 * small)) - 1)


def find_viscosity(n=32, steps=20, dt=0.05, true=0.05, iterations=100):
    """The viscosity found from a flow's beginning and end, starting from a fifth of it; prints the loss."""
    flow, start = Flow(n, dt), eddies(n)
    seen = flow.run(start, paddle.to_tensor(true, dtype="float64"), steps)
    logarithm = paddle.create_parameter([], "float64", default_initializer=constant(math.log(true / 5)))
    descent = paddle.optimizer.Adam(0.1, parameters=[logarithm])
    for i in range(iterations):
        loss = ((flow.run(start, logarithm.exp(), steps) - seen) ** 2).mean()
        loss.backward()
        descent.step()
        descent.clear_grad()
        if i % 20 == 0:
            print(f"  iteration {i:3d}: loss {float(loss):.2e}, viscosity {math.exp(float(logarithm)):.4f}")
    return math.exp(float(logarithm))


def find_beginning(n=32, steps=20, dt=0.05, viscosity=0.02, iterations=200):
    """(first loss, last loss, relative error) of a flow's beginning found from its end, starting from rest."""
    flow, true = Flow(n, dt), eddies(n)
    nu = paddle.to_tensor(viscosity, dtype="float64")
    seen = flow.run(true, nu, steps)
    start = paddle.create_parameter([n, n], "float64", default_initializer=constant(0.0))
    descent = paddle.optimizer.Adam(0.1, parameters=[start])
    losses = []
    for i in range(iterations):
        loss = ((flow.run(start, nu, steps) - seen) ** 2).mean()
        loss.backward()
        descent.step()
        descent.clear_grad()
        losses.append(float(loss))
        if i % 50 == 0:
            print(f"  iteration {i:3d}: loss {losses[-1]:.2e}")
    return losses[0], losses[-1], float(((start - true) ** 2).mean().sqrt() / (true**2).mean().sqrt())


def constant(value):
    """An initializer."""
    return paddle.nn.initializer.Constant(value)


def main():
    """Check the solver and its gradient, then solve both inverse problems."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=32, help="along each side of the square")
    n = parser.parse_args().points
    print(f"Taylor-Green vortex: relative error {vortex_error(n):.1e}")
    print(f"slope through 20 steps against finite differences: relative error {gradient_error(n):.1e}")
    print("viscosity, 0.05 in truth:")
    print(f"  found {find_viscosity(n):.4f}")
    print("the beginning from the end:")
    first, last, error = find_beginning(n)
    print(f"  loss {first:.2e} -> {last:.2e}; beginning off by {100 * error:.1f} %")


if __name__ == "__main__":
    main()
