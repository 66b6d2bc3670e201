"""The door of a run: checks the arguments of `simulate`, and returns what computes the rounds."""

from collections.abc import Sequence
from typing import TypeAlias

from fedjax_mm import checks
from fedjax_mm.asynchrony.dispatch import Dispatch
from fedjax_mm.asynchrony.run import Arrivals
from fedjax_mm.base import Algorithm, Assignment, Task
from fedjax_mm.chunks import ClientMap
from fedjax_mm.compiler import check_fusions
from fedjax_mm.parts import check_assignment
from fedjax_mm.round import Rounds
from fedjax_mm.stacks import stacks_of
from fedjax_mm.tasks.view import changes
from fedjax_mm.train import Options

Run: TypeAlias = Rounds | Arrivals
"""A run in rounds, or an asynchronous one, with the same methods."""


def run_of(
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment | Dispatch,
    client_map: ClientMap = "auto",
    client_axis: str | None = None,
) -> Run:
    """Returns a run, given the arguments of `simulate`.

    Invalid arguments raise the same errors as in `simulate`.
    """
    check_fusions()
    options = Options(checks.check_client_map(client_map), checks.check_client_axis(client_axis))
    if not isinstance(assignment, Dispatch):
        stacks = stacks_of(tasks, algorithm, check_assignment(assignment))
        how = options._replace(with_reports=assignment.observe is not None)
        return Rounds(stacks, assignment, how)
    stacks = stacks_of(tasks, algorithm, assignment, by="dispatch")
    if any(changes(stack.task) for stack in stacks):
        raise ValueError(
            "the task changes over rounds, but asynchronous jobs overlap rounds; use an assignment "
            "in rounds, such as mfa_rr"
        )
    return Arrivals(stacks, assignment, options)
