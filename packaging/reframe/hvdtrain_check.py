"""ReFrame check of an installation: two ranks of one host train a small GPT.

reframe -c packaging/reframe/hvdtrain_check.py -r
"""

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import (
    parameter,
    performance_function,
    run_before,
    sanity_function,
)

METRICS = "run/metrics.jsonl"
STEPS = 20
# Of the first and the last step. They depend neither on the number of ranks nor on the controller.
FIRST_LOSS, LAST_LOSS = 5.3124, 2.9515
TOLERANCE = 0.005


@rfm.simple_test
class HvdtrainTwoRanks(rfm.RunOnlyRegressionTest):
    descr = "hvdtrain: gpt-nano on 2 ranks"
    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    tags = {"ml", "mpi"}
    time_limit = "10m"
    controller = parameter(["gloo", "mpi"])
    num_tasks = 1  # horovodrun, which starts the ranks
    executable = "horovodrun"
    env_vars = {"OMP_NUM_THREADS": "1"}

    @run_before("run")
    def set_options(self):
        train = f"hvdtrain train --config gpt-nano --train.duration {STEPS} --eval.every 0"
        train += " --checkpoint.every 0 --telemetry.port 0 --run.root . --run.id run"
        self.executable_opts = ["-np", "2", f"--{self.controller}", *train.split()]

    @sanity_function
    def two_ranks_reach_the_reference_loss(self):
        steps = sn.extractall(r'"step": (\d+)', METRICS, 1, int)
        ranks = sn.extractall(r'"world_size": (\d+)', METRICS, 1, int)
        losses = sn.extractall(r'"loss": ([\d.]+)', METRICS, 1, float)
        return sn.all(
            [
                sn.assert_eq(steps, list(range(1, STEPS + 1))),
                sn.assert_eq(ranks, [2] * STEPS),
                sn.assert_reference(losses[0], FIRST_LOSS, -TOLERANCE, TOLERANCE),
                sn.assert_reference(losses[-1], LAST_LOSS, -TOLERANCE, TOLERANCE),
            ]
        )

    @performance_function("samples/s")
    def throughput(self):
        return sn.extractall(r'"samples_per_second": ([\d.]+)', METRICS, 1, float)[-1]
