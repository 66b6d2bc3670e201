"""Plain loops of jobs: models that arrive, get trainings in every round, and finish."""

import numpy as np


def completed(needs, num_clients, arrivals, share):
    """The rounds after which the models finish, if trainings alone decide.

    Args:
      needs: the number of client trainings that each model needs.
      num_clients: N, each of which trains one model a round.
      arrivals: the number of completed rounds after which each model arrives.
      share: the number of clients of each active model, given their number of models.
    """
    finished, done = [np.nan] * len(needs), [0] * len(needs)
    for t in range(1, 100):
        at_work = [m for m in range(len(needs)) if arrivals[m] < t and np.isnan(finished[m])]
        for m in at_work:
            done[m] += share(num_clients, at_work)
        for m in at_work:
            if done[m] >= needs[m]:
                finished[m] = t
    return finished


def rotation_spread(trained, cuts):
    """The most that two clients' counts for a model differ, and what MFA-RR allows.

    Args:
      trained: ``[rounds, clients]``, the model that each client trained.
      cuts: the number of frames that ended early.
    """
    counts = np.stack([(trained == m).sum(0) for m in range(trained.max() + 1)])
    return int(np.ptp(counts, axis=1).max()), cuts + 1
