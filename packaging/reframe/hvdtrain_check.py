"""ReFrame check: two ranks train a small GPT, and the loss decreases as expected.

reframe -c packaging/reframe/hvdtrain_check.py -r
"""

import reframe as rfm
import reframe.utility.sanity as sn


@rfm.simple_test
class HvdtrainTwoRanks(rfm.RunOnlyRegressionTest):
    descr = "hvdtrain: gpt-nano on 2 ranks"
    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    controller = parameter(["gloo", "mpi"])
    num_tasks = 2
    num_tasks_per_node = 2
    time_limit = "10m"
    steps = variable(int, value=20)
    tags = {"ml", "mpi"}

    @run_before("run")
    def set_command(self):
        train = f"hvdtrain train --config gpt-nano --train.steps {self.steps} --eval.every 0"
        train += " --checkpoint.every 0 --telemetry.port 0 --run.root . --run.id run"
        if self.controller == "mpi":
            self.executable, self.executable_opts = "hvdtrain", train.split()[1:]
        else:  # one task, which starts the ranks of its host
            self.num_tasks, self.num_tasks_per_node = 1, 1
            self.executable, self.executable_opts = "horovodrun", ["-np", "2", "--gloo"]
            self.executable_opts += train.split()
        self.env_vars = {"OMP_NUM_THREADS": "1"}

    @sanity_function
    def loss_decreases_on_two_ranks(self):
        steps = sn.extractall(r'"step": (\d+)', "run/metrics.jsonl", 1, int)
        worlds = sn.extractall(r'"world_size": (\d+)', "run/metrics.jsonl", 1, int)
        losses = sn.extractall(r'"loss": ([\d.]+)', "run/metrics.jsonl", 1, float)
        return sn.all(
            [
                sn.assert_eq(sn.sorted(steps), list(range(1, self.steps + 1))),
                sn.assert_eq(sn.count_uniq(worlds), 1),
                sn.assert_eq(worlds[0], 2),
                # The loss curve does not depend on the number of ranks or on the controller.
                sn.assert_reference(losses[0], @FIRST@, -0.01, 0.01),
                sn.assert_reference(losses[-1], @LAST@, -0.02, 0.02),
            ]
        )

    @performance_function("samples/s")
    def samples_per_second(self):
        return sn.extractall(r'"samples_per_second": ([\d.]+)', "run/metrics.jsonl", 1, float)[-1]
