"""MaxFL with several models: a small reproduction, compared with `simulate`."""

import json

import jax
import numpy as np
import pytest

from fedjax_mm import appealing, local_sgd, maxfl, mfa_rr, simulate
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ITEMS, multi_maxfl
from fedjax_mm.papers.cho2022.clients import POPULATIONS, draw_clients
from fedjax_mm.papers.multi_maxfl import QUESTIONS, ask
from fedjax_mm.plots import save_figure
from fedjax_mm.tasks import classification, own_models, requiring
from fedjax_mm.tasks.networks import MLP

ITEM = ITEMS["multi-maxfl"]
SMALL = validate(
    type(ITEM.settings),
    ITEM.settings.model_dump()
    | {
        "num_clients": 6,
        "num_unseen": 3,
        "local_steps": 3,
        "batch_size": 8,
        "requirement": {"num_steps": 2, "batch_size": 8},
        "appealing_from": 2,
        "num_rounds": 4,
        "num_seeds": 2,
        "record_every": 2,
    },
)


@pytest.fixture(
    scope="module",
    params=[
        (["MFA-RR"], QUESTIONS[:2]),
        pytest.param((["MFA-Rand", "MFA-RR"], QUESTIONS), marks=pytest.mark.slow),
    ],
    ids=lambda param: f"{' and '.join(param[0])}, {len(param[1])} models",
)
def result(request):
    """Results of some of the assignments and questions, which determine the number of programs."""
    names, questions = request.param
    some = {name: multi_maxfl.ASSIGNMENTS[name] for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_maxfl, "ASSIGNMENTS", some)
        patch.setattr(multi_maxfl, "QUESTIONS", questions)
        yield ITEM.make(SMALL)


def clients():
    """The client data of the small instance, one draw for each seed."""
    population = POPULATIONS["digits"]._replace(num_clients=6, num_unseen=3)
    words = np.random.SeedSequence(SMALL.seed).generate_state(SMALL.num_seeds)
    seeds = [int(word) for word in words]
    return draw_clients(
        "digits",
        None,
        population,
        partition="dirichlet_labels",
        flipped=SMALL.flipped,
        flips="everywhere",
        seeds=seeds,
    )


def test_three_questions_label_the_same_images():
    data = clients()
    asked = ask(data)
    for part in ("train", "test"):
        (x, y), (images, answers) = (getattr(each, part).examples for each in (data, asked))
        assert images is x
        assert answers.dtype == np.int32
        labels = np.asarray(y)
        np.testing.assert_array_equal(answers[:, 0], labels)
        np.testing.assert_array_equal(answers[:, 1], labels % 5)
        np.testing.assert_array_equal(answers[:, 2], labels >= 5)
        np.testing.assert_array_equal(getattr(asked, part).counts, getattr(data, part).counts)


def test_a_small_instance_runs_from_data_to_figure(result, tmp_path):
    assignments = result["assignment"].values.tolist()
    assert dict(result.sizes) == {
        "assignment": len(assignments),
        "aggregation": 2,
        "seed": 2,
        "round": 3,
        "model": len(multi_maxfl.QUESTIONS),
    }
    assert result["question"].values.tolist() == list(multi_maxfl.QUESTIONS)
    for name in ("appeal", "unseen_appeal", "accuracy", "unseen_accuracy"):
        assert ((result[name] >= 0) & (result[name] <= 1)).all()
    about = json.loads(result.attrs["manifest"])
    assert about["population"]["num_unseen"] == 3
    assert about["config"]["num_rounds"] == 4
    measured, statements, _, checks, (table,), _ = ITEM.findings(result, SMALL)
    assert statements == ()
    appeal = 100 * result["appeal"].isel(round=-1).mean("model")
    for check, who in zip(checks, assignments, strict=True):
        here = appeal.sel(assignment=who)
        lead = here.sel(aggregation="MaxFL") - here.sel(aggregation="FedAvg")
        assert check.text.startswith(who)
        assert check.evidence.startswith(f"{lead.mean().item():.1f}")
    assert len(table.rows) == len(assignments) * 2 * len(multi_maxfl.QUESTIONS)
    last = 100 * result["appeal"].isel(round=-1).sel(assignment="MFA-RR", aggregation="MaxFL")
    row = table.rows[-len(multi_maxfl.QUESTIONS)]
    assert row[:3] == ("MFA-RR", "MaxFL", "which digit")
    mean = last.isel(model=0).mean("seed").item()
    assert row[3].startswith(f"{mean:.1f}")
    figure = ITEM.figure(result, measured, SMALL)
    save_figure(figure, tmp_path / "figure.png")
    assert f"6 clients, {len(multi_maxfl.QUESTIONS)} models at once" in figure.get_label()
    assert len(figure.axes) == len(assignments)


def test_a_run_equals_simulate(result):
    """One run is repeated with the key and the clients of its seed."""
    seed, module, num_models = 1, MLP(10, (64, 30), 0.5), result.sizes["model"]
    algorithm = maxfl(local_sgd(SMALL.learning_rate, steps=3, batch_size=8))
    how = {"learning_rate": SMALL.learning_rate, "batch_size": 8, "num_steps": 2}
    staying = appealing(mfa_rr(6, num_models), cohort_size=6, from_round=2)

    def run(key, data):
        tasks = [
            classification(data, module, rngs=("dropout",), scale=1 / 255, column=column)
            for column in range(num_models)
        ]
        for column, task in enumerate(tasks):
            own = own_models(key, task, model=column, **how)
            tasks[column] = requiring(task, own, num_unseen=3)
        return simulate(key, tasks, algorithm, staying, 4, record_every=2)[1]

    key = jax.random.fold_in(jax.random.key(SMALL.seed), seed)
    trace = jax.jit(run)(key, ask(clients()).select(seed))
    expected = result.sel(assignment="MFA-RR", aggregation="MaxFL", seed=seed)
    for name, values in trace.metrics.items():
        actual = expected[name].transpose("round", "model")
        np.testing.assert_allclose(actual, values, rtol=2e-5, atol=1e-6, err_msg=name)
    updates = expected["client_updates"].transpose("round", "model")
    np.testing.assert_array_equal(updates, np.cumsum(trace.client_updates, axis=0))
    idle = expected["idle_rounds"].transpose("round", "model")
    np.testing.assert_array_equal(idle, np.cumsum(trace.idle_rounds, axis=0))
