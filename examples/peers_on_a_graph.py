"""Sixteen peers without a server: how much does the graph matter, and which peer is worst off?"""

from fedjax_mm import fedavg, local_sgd, peers, plots, simulate, to_dataset
from fedjax_mm.data import digits, federate, partition
from fedjax_mm.tasks import LogisticRegression, classification
from fedjax_mm.topologies import mixing, mixing_matrix, random_regular, ring

NUM_PEERS = 16
pool = digits()
parts = partition.dirichlet(pool.train[1], NUM_PEERS, alpha=0.1)  # few digits at each peer
task = classification(federate(pool, parts), LogisticRegression(10), scale=1 / 255)
sgd = fedavg(local_sgd(0.5, steps=5, batch_size=10))

for graph in (ring(), random_regular(4)):
    gossip = mixing(peers(NUM_PEERS), graph)
    last = to_dataset(simulate(0, task, sgd, gossip, num_rounds=60)[1]).isel(round=-1)
    accuracy = last.test_accuracy
    print(f"{graph}: mean {accuracy.mean().item():.3f}, worst {accuracy.min().item():.3f}")

picture = plots.topology(mixing_matrix(graph, NUM_PEERS), last.loss, label="loss on all data")
picture.savefig("peers_on_a_graph.png")
