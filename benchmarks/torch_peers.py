"""W1 and the learning workloads W2 to W5 in PyTorch: a loop over clients, and vectorized.

The contract is that of `learning_peers`: same data, parameters and cohorts; examples of a step are
drawn uniformly with replacement by one `torch.randint` a round, or prescribed by `batches`. All
data are tensors on the device before the clock starts; there is no DataLoader. On a GPU, a round of
the vectorized forms can be one CUDA graph, draws included.

What was tried on the CPU, in client updates per second (two cores, shared: two threads often fight
for them, and a factor below 1.3 says little):

- Loop, W2: batches gathered once a client 2,300, in each step 1,900; steps by `autograd.grad` and
  `torch._foreach_add_` are kept, `torch.optim.SGD` 1,900 to 2,200, with `foreach` 1,200 to 1,700.
- Loop, W4: kernels channels last 2.5, as they come 2.2, without oneDNN 1.5.
- Loop with a compiled step: W2 2,100 or 1,900 without, W3 76 or 57, W4 1.1 or 1.6: not kept, and it
  takes 12 to 20 s to compile.
- Vectorized, W2 on one thread: `vmap(grad(loss))` 15,000, `autograd.grad` of the sum of
  `vmap(loss)` 18,000, `torch.baddbmm` by hand 24,000, `vmap(grad(loss))` compiled whole 80,000,
  its step alone 71,000. W2b compiled: 53,000, in chunks of 100 clients 70,000, and on a busier
  machine 31,000. Shapes are compiled as they are (`dynamic=False`).
- Threads: on a quiet machine two helped W4 and the vectorized W3 1.3 to 1.5 times, W3's loop not,
  W2 now and then; on a loaded one, beside XLA's threads, W3's loop did 2.8, and 97 to 120 on one.
  The benchmark times a round with one thread and with all and takes the faster; the compiled
  programs have one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.func import grad, vmap
from torch.nn import functional

from benchmarks.learning import Params, Workload
from benchmarks.peers import Quadratic, quadratic_clients
from fedjax_mm.cli.workloads import Model

Tensors = list[torch.Tensor]
Run = Callable[[], Any]  # returns `Params`, or w `[d]` of W1
Loss = Callable[[Tensors, torch.Tensor, torch.Tensor], torch.Tensor]


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Sets the precision of products on GPUs: "high" is TF32, "highest" float32."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = cuda.allow_tf32, cudnn.allow_tf32
    cuda.allow_tf32 = cudnn.allow_tf32 = name == "high"
    try:
        yield
    finally:
        cuda.allow_tf32, cudnn.allow_tf32 = before


def _to_torch(model: Model, params: Params) -> Tensors:
    """Kernel, bias, kernel, ... in the layout of PyTorch: `[out, in, 5, 5]`, `[out, in]`."""
    tensors = []
    for kernel, bias in params:
        if kernel.ndim == 4:
            kernel = kernel.transpose(3, 2, 0, 1)
        else:
            kernel = _flattening(model, kernel, len(tensors) // 2, to_torch=True).T
        tensors += [torch.tensor(kernel.copy()), torch.tensor(bias)]
    return tensors


def _from_torch(model: Model, tensors: Tensors) -> Params:
    arrays = [tensor.detach().cpu().numpy() for tensor in tensors]
    params = []
    for layer, (kernel, bias) in enumerate(zip(arrays[::2], arrays[1::2], strict=True)):
        if kernel.ndim == 4:
            kernel = kernel.transpose(2, 3, 1, 0)
        else:
            kernel = _flattening(model, kernel.T, layer, to_torch=False)
        params.append((kernel, bias))
    return params


def _flattening(model: Model, kernel: np.ndarray, layer: int, *, to_torch: bool) -> np.ndarray:
    """Reorders the inputs of the layer after the convolutions: images end, or begin, by channel."""
    if not model.channels or layer != len(model.channels):
        return kernel
    channels = model.channels[-1]
    if to_torch:
        by_channel = kernel.reshape(-1, channels, kernel.shape[1]).transpose(1, 0, 2)
    else:
        by_channel = kernel.reshape(channels, -1, kernel.shape[1]).transpose(1, 0, 2)
    return by_channel.reshape(kernel.shape)


def _loss(model: Model) -> Loss:
    """Returns `loss(params, x, y)`, the mean cross-entropy."""
    num_convolutions = len(model.channels)

    def loss(params: Tensors, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        layers = list(zip(params[::2], params[1::2], strict=True))
        for layer, (kernel, bias) in enumerate(layers[:num_convolutions]):
            x = functional.conv2d(x, kernel, bias, padding=model.padding)
            x = functional.relu(functional.max_pool2d(x, 2) if model.is_pooled(layer) else x)
        x = x.flatten(1)
        for kernel, bias in layers[num_convolutions:-1]:
            x = functional.relu(functional.linear(x, kernel, bias))
        return functional.cross_entropy(functional.linear(x, *layers[-1]), y)

    return loss


def _tensors(workload: Workload, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs `[K, n, ...]`, images channels first, and classes `[K, n]`."""
    inputs, labels = workload.examples(seed)
    if inputs.ndim == 5:
        inputs = np.ascontiguousarray(np.moveaxis(inputs, -1, 2))
    return torch.tensor(inputs), torch.tensor(labels, dtype=torch.int64)


def _quadratic_loss(mu: float) -> Loss:
    """Returns `loss(params, A, b)` of a batch of one objective."""

    def loss(params: Tensors, A: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        (w,) = params
        return 0.5 * (A[0] @ w) @ w - b[0] @ w + 0.5 * mu * (w @ w)

    return loss


class _Problem(NamedTuple):
    """What all forms share, on the device.

    Attributes:
      loss: of a batch.
      inputs: `[K, n, ...]`.
      labels: `[K, n, ...]`.
      initial: the parameters.
      cohort: returns the clients of round t, `[S]`; t is an int, or a tensor `[1]`.
      draw: returns their examples, `[S, E, B]`.
      result: makes NumPy arrays of the parameters.
    """

    loss: Loss
    inputs: torch.Tensor
    labels: torch.Tensor
    initial: Tensors
    cohort: Callable[[Any], torch.Tensor]
    draw: Callable[[Any], torch.Tensor]
    result: Callable[[Tensors], Any]


def _problem(
    workload: Workload | Quadratic,
    num_rounds: int,
    seed: int,
    batches: np.ndarray | None,
    device: str,
) -> _Problem:
    if isinstance(workload, Quadratic):
        matrices, vectors = quadratic_clients(workload.num_clients, workload.block_size)
        inputs, labels = (
            torch.tensor(x[:, None], dtype=torch.float32) for x in (matrices, vectors)
        )
        initial = [torch.zeros(vectors.shape[1])]
        loss = _quadratic_loss(workload.mu)
    else:
        inputs, labels = _tensors(workload, seed)
        initial = _to_torch(workload.model, workload.params(seed))
        loss = _loss(workload.model)
    cohorts = _table(workload.cohorts(num_rounds, seed), device)
    size = (workload.cohort_size, workload.num_steps, workload.batch_size)

    def random(_: Any) -> torch.Tensor:
        return torch.randint(workload.num_examples, size, device=device)

    def result(tensors: Tensors) -> Any:
        if isinstance(workload, Quadratic):
            return tensors[0].detach().cpu().numpy()
        return _from_torch(workload.model, tensors)

    return _Problem(
        loss,
        inputs.to(device),
        labels.to(device),
        [w.to(device) for w in initial],
        cohorts,
        random if batches is None else _table(batches, device),
        result,
    )


def _table(numbers: np.ndarray, device: str) -> Callable[[Any], torch.Tensor]:
    """Returns the numbers of round t, for t an int or a tensor `[1]` on the device."""
    table = torch.tensor(numbers, dtype=torch.int64, device=device)
    # `table[t]` of a tensor would wait for its value.
    return lambda t: table[t] if isinstance(t, int) else table.index_select(0, t)[0]


def loop_rounds(
    workload: Workload | Quadratic,
    num_rounds: int,
    *,
    seed: int = 0,
    batches: np.ndarray | None = None,
    num_threads: int = 1,
    device: str = "cpu",
) -> Run:
    """Sets up a workload as a PyTorch loop over rounds, clients and steps.

    Args:
      workload: what to do.
      num_rounds: T, rounds of one `run()`.
      seed: of the data, the parameters and the cohorts.
      batches: examples of every step, `[T, S, E, B]`, numbered within their client; or None.
      num_threads: of PyTorch.
      device: "cpu", or "cuda".

    Returns:
      `run()`, which plays all rounds, waits for them and returns the parameters.
    """
    problem = _problem(workload, num_rounds, seed, batches, device)
    inputs, labels, loss = problem.inputs, problem.labels, problem.loss
    # Read before the clock starts, because a GPU's clients would be waited for in each round.
    cohorts = [problem.cohort(t).tolist() for t in range(num_rounds)]
    local = [torch.empty_like(w) for w in problem.initial]
    local = [w.to(memory_format=torch.channels_last) if w.ndim == 4 else w for w in local]
    for w in local:
        w.requires_grad_()

    def client_update(server: Tensors, client: int, steps: torch.Tensor) -> None:
        with torch.no_grad():
            torch._foreach_copy_(local, server)
        # A client's batches are gathered at once.
        for x, y in zip(inputs[client][steps], labels[client][steps], strict=True):
            grads = torch.autograd.grad(loss(local, x, y), local)
            with torch.no_grad():
                torch._foreach_add_(local, grads, alpha=-workload.learning_rate)

    def run() -> Any:
        torch.set_num_threads(num_threads)
        server = problem.initial
        for t, cohort in enumerate(cohorts):
            total = [torch.zeros_like(w) for w in server]
            for client, steps in zip(cohort, problem.draw(t), strict=True):
                client_update(server, client, steps)
                with torch.no_grad():
                    torch._foreach_add_(total, local)
            torch._foreach_div_(total, workload.cohort_size)
            server = total
        return problem.result(server)

    return run


def vmap_rounds(
    workload: Workload | Quadratic,
    num_rounds: int,
    *,
    seed: int = 0,
    batches: np.ndarray | None = None,
    num_threads: int = 1,
    chunk_size: int | None = None,
    compiled: bool = False,
    graphed: bool = False,
    device: str = "cpu",
) -> Run:
    """Sets up a workload in PyTorch with `vmap(grad(loss))` over `chunk_size` clients of a round.

    Args, Returns: as `loop_rounds`; a chunk is the whole cohort by default. `compiled` calls
      `torch.compile`, which needs a C++ compiler: on all steps of a client if they are at most
      five, else on one step. `graphed` replays each round as one CUDA graph, on GPUs alone.
    """
    problem = _problem(workload, num_rounds, seed, batches, device)
    gradient = vmap(grad(problem.loss))

    def start(server: Tensors, num_clients: int) -> Tensors:
        return [w.expand(num_clients, *w.shape).clone() for w in server]

    def step(local: Tensors, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        grads = list(gradient(local, x, y))
        if compiled:  # which fuses this
            return [w - workload.learning_rate * g for w, g in zip(local, grads, strict=True)]
        torch._foreach_add_(local, grads, alpha=-workload.learning_rate)
        return local

    def total(local: Tensors) -> Tensors:
        return [w.sum(dim=0) for w in local]

    size = chunk_size or workload.cohort_size
    form = _Vectorized(start, step, total, compiled, graphed, size)
    return _vectorized_rounds(problem, workload, num_rounds, num_threads, form)


def baddbmm_rounds(
    workload: Workload,
    num_rounds: int,
    *,
    seed: int = 0,
    batches: np.ndarray | None = None,
    num_threads: int = 1,
    chunk_size: int | None = None,
    graphed: bool = False,
    device: str = "cpu",
) -> Run:
    """Sets up a workload of dense layers in PyTorch with batched products written by hand.

    All clients' layers are one `torch.baddbmm`, and the sum of their losses is differentiated by
    `torch.autograd.grad`: fewer calls than `vmap(grad(loss))`.

    Args, Returns: as `vmap_rounds`.

    Raises:
      ValueError: if the model has convolutions.
    """
    if workload.model.channels:
        raise ValueError(f"{workload.name} has convolutions: use vmap_rounds, baddbmm has none.")
    problem = _problem(workload, num_rounds, seed, batches, device)

    def start(server: Tensors, num_clients: int) -> Tensors:
        transposed = [w.T if w.ndim == 2 else w[None] for w in server]
        return [w.expand(num_clients, *w.shape).clone().requires_grad_() for w in transposed]

    def step(local: Tensors, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        *hidden, last = zip(local[1::2], local[::2], strict=True)
        for bias, kernel in hidden:
            x = functional.relu(torch.baddbmm(bias, x, kernel))
        logits = torch.baddbmm(last[0], x, last[1])
        sum_of_means = (
            functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
            / workload.batch_size
        )
        grads = torch.autograd.grad(sum_of_means, local)
        with torch.no_grad():
            torch._foreach_add_(local, grads, alpha=-workload.learning_rate)
        return local

    def total(local: Tensors) -> Tensors:
        with torch.no_grad():
            sums = [w.sum(dim=0) for w in local]
            return [w.T if i % 2 == 0 else w[0] for i, w in enumerate(sums)]

    form = _Vectorized(start, step, total, False, graphed, chunk_size or workload.cohort_size)
    return _vectorized_rounds(problem, workload, num_rounds, num_threads, form)


class _Vectorized(NamedTuple):
    """A vectorized form: all clients' parameters, one step of all, their sum over clients."""

    start: Callable[[Tensors, int], Tensors]
    step: Callable[[Tensors, torch.Tensor, torch.Tensor], Tensors]
    total: Callable[[Tensors], Tensors]
    compiled: bool
    graphed: bool
    chunk_size: int


def _vectorized_rounds(
    problem: _Problem,
    workload: Workload | Quadratic,
    num_rounds: int,
    num_threads: int,
    form: _Vectorized,
) -> Run:
    """The rounds shared by both vectorized forms, which gather examples in each step."""
    inputs, labels = problem.inputs.flatten(0, 1), problem.labels.flatten(0, 1)

    def step(local: Tensors, batch: torch.Tensor) -> Tensors:
        return form.step(local, inputs[batch], labels[batch])

    def client_updates(server: Tensors, numbers: torch.Tensor) -> Tensors:
        local = form.start(server, len(numbers))
        for batch in numbers.unbind(dim=1):
            local = step(local, batch)
        return form.total(local)

    if form.compiled and workload.num_steps <= 5:
        client_updates = torch.compile(client_updates, dynamic=False)
    elif form.compiled:
        step = torch.compile(step, dynamic=False)

    def one_round(server: Tensors, t: Any) -> Tensors:
        numbers = problem.cohort(t)[:, None, None] * workload.num_examples + problem.draw(t)
        sums = [client_updates(server, chunk) for chunk in numbers.split(form.chunk_size)]
        return [reduce(torch.add, w) / workload.cohort_size for w in zip(*sums, strict=True)]

    if form.graphed:
        play = _graph(one_round, problem.initial)
        return lambda: problem.result(play(num_rounds))

    def run() -> Any:
        torch.set_num_threads(num_threads)
        server = problem.initial
        for t in range(num_rounds):
            server = one_round(server, t)
        return problem.result(server)

    return run


def _graph(
    one_round: Callable[[Tensors, torch.Tensor], Tensors], initial: Tensors
) -> Callable[[int], Tensors]:
    """Captures a round, and returns `play(num_rounds)`, which replays it from the initial params.

    The number of the round is in the device's memory, so that nothing is launched between replays.
    """
    server = [w.clone() for w in initial]
    t = torch.zeros(1, dtype=torch.int64, device=initial[0].device)

    def advance() -> None:
        new = one_round(server, t)
        with torch.no_grad():
            torch._foreach_copy_(server, new)
            t.add_(1)

    def restart() -> None:
        torch._foreach_copy_(server, initial)
        t.zero_()

    # Warm up on another stream, as PyTorch's documentation of CUDA graphs asks: libraries allocate
    # and compile at their first calls, which cannot be captured.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            restart()
            advance()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        advance()

    def play(num_rounds: int) -> Tensors:
        restart()
        for _ in range(num_rounds):
            graph.replay()
        torch.cuda.synchronize()
        return server

    return play
