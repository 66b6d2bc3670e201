"""A vectorized simulator of multi-model federated learning in JAX."""

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignment import fedcluster, full_participation, mfa_rand, mfa_rr, sequential
from fedjax_mm.base import Algorithm, AnalyticTask, Assignment, Contribution, SparseUpdate, Task
from fedjax_mm.schedules import inverse_time, per_frame
from fedjax_mm.simulate import State, Trace, advance, init, simulate
from fedjax_mm.tasks.quadratic import Quadratic, quadratic
