"""Examples of each command's help: a line to type and what it does, the most useful first."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "init": (
        ("labctl init mylab", "Create a lab directory with .env, hosts.txt, hostfiles and workloads"),
        ("labctl init", "Add the files that the current directory lacks"),
    ),
    "setup": (
        ("labctl setup", "Install what is missing of Docker, after a question"),
        ("labctl setup --yes", "Install it without a question, as in a script"),
    ),
    "doctor": (
        ("labctl doctor", "Check hosts, Docker and the lab"),
        ("labctl doctor --fix", "Apply fixes that only change what labctl owns, asking for each"),
        ("labctl doctor -n worker-1", "Check one node and its host"),
    ),
    "health": (
        ("labctl health", "Check all hosts"),
        ("labctl health worker-1 --verbose", "Show every check of the host of a node"),
        ("labctl health worker-1 --ticket", "Print a text for whoever repairs the host"),
        ("labctl health --since 1h", "Count only what happened in the last hour"),
    ),
    "devices": (
        ("labctl devices", "List accelerators, cores and networks, and the node that gets each"),
        ("labctl devices -s LAB_NODES=4", "Show how they would be shared by four nodes"),
    ),
    "config": (
        ("labctl config", "Show the settings that are set or decided, and why"),
        ("labctl config --all", "Show those at their defaults, too"),
        ("labctl config -s LAB_NODES=4 --json", "Show them as JSON, with one changed"),
    ),
    "render": (
        ("labctl render", "Write .lab/nodes/, from which `docker compose` can start the lab by hand"),
        ("labctl render -s LAB_MEMORY=16g", "Write it with another memory limit"),
    ),
    "build": (
        ("labctl build", "Build the image of the lab"),
        ("labctl build --workload mnist-horovod", "Build the image that a workload needs"),
        ("labctl build --from pytorch/pytorch", "Add what a node needs to an image of yours"),
        ("labctl build --sbom packages.json", "Also write the list of its packages"),
    ),
    "up": (
        ("labctl up", "Create and start the lab; safe to repeat"),
        ("labctl up -s LAB_NODES=3", "Start it with three nodes"),
        ("labctl up --workload mnist-horovod", "Start it with the image that a workload needs"),
        ("labctl up --dry-run", "Print what would be done"),
    ),
    "k8s": (
        ("labctl k8s render opt-tiny -s LAB_ACCELERATOR=cpu", "Print the manifests of a workload"),
        ("labctl k8s submit opt-tiny -s LAB_ACCELERATOR=cpu", "Create its job, and leave it to the cluster"),
        ("labctl k8s import job.yaml", "Make a workload of an MPIJob"),
    ),
    "k8s render": (
        ("labctl k8s render opt-tiny -s LAB_ACCELERATOR=cpu", "Print the manifests of a workload"),
        ("labctl k8s render opt-tiny -s LAB_ACCELERATOR=cpu | kubectl apply --server-side -f -", "Apply them"),
        ("labctl k8s render opt-tiny -s LAB_ACCELERATOR=cpu -s LAB_NODES=4", "Print them for four workers"),
    ),
    "k8s export": (
        (
            "labctl k8s export opt-tiny --kustomize deploy -s LAB_ACCELERATOR=cpu",
            "Write a directory for `kubectl apply --server-side -k deploy`",
        ),
        (
            "labctl k8s export opt-13b --kustomize deploy --rehearse -s LAB_ACCELERATOR=cpu",
            "Write the small form of a workload",
        ),
    ),
    "k8s submit": (
        (
            "labctl k8s submit opt-tiny -s LAB_ACCELERATOR=cpu",
            "Create the job of a workload, and leave it to the cluster",
        ),
        (
            "labctl k8s submit opt-tiny --timeout 30m --set steps=200 -s LAB_ACCELERATOR=cpu",
            "Change its time limit and an argument",
        ),
    ),
    "k8s delete": (
        ("labctl k8s delete opt-tiny", "Delete the job of a workload"),
        ("labctl k8s delete opt-tiny --storage", "Delete the volume of the lab with all its data, too"),
    ),
    "k8s import": (
        ("labctl k8s import job.yaml", "Write the MPIJob as a workload, and print its settings"),
        ("labctl k8s import job.yaml --json", "Print what was written, and the settings, as JSON"),
    ),
    "bundle": (
        ("labctl bundle save lab.bundle", "Save the lab with its image to a file"),
        ("labctl bundle load lab.bundle lab", "Load it on a machine without a network"),
    ),
    "bundle save": (
        ("labctl bundle save lab.bundle", "Save the lab with its image, without keys and secrets"),
        ("labctl bundle save lab.bundle --with-cache", "Add models and datasets"),
        ("labctl bundle save lab.bundle --workload mnist-horovod", "Add the image that a workload needs"),
    ),
    "bundle load": (
        ("labctl bundle load lab.bundle lab", "Unpack a bundle into the directory lab, and load its images"),
        ("labctl bundle load lab.bundle lab --force", "Replace files that differ"),
    ),
    "keys": (
        ("labctl keys rotate", "Replace the ssh keys of the lab"),
        ("labctl keys rotate -C mylab", "Replace those of the lab in another directory"),
    ),
    "keys rotate": (
        ("labctl keys rotate", "Replace the ssh keys; a lab that is up gets new containers"),
        ("labctl keys rotate -C mylab", "Replace those of the lab in another directory"),
    ),
    "status": (
        ("labctl status", "Show nodes and their health"),
        ("labctl status --verbose", "Show when each node was last fit to run, too"),
        ("labctl status --json", "Print them as JSON, for a script"),
    ),
    "devcontainer": (
        ("labctl devcontainer", "Write .devcontainer/devcontainer.json for VS Code"),
        ("labctl devcontainer --force", "Replace a file that was edited"),
    ),
    "shell": (
        ("labctl shell", "Open a shell in the launcher"),
        ("labctl shell worker-1", "Open a shell in a worker"),
    ),
    "exec": (
        ("labctl exec -- python --version", "Run a command in the launcher"),
        ("labctl exec worker-1 -- df -h /dev/shm", "Run it in a worker"),
        ("labctl exec worker-0,worker-1 -- hostname", "Run it in several workers at once"),
        ("labctl exec --all -- hostname", "Run it in all workers at once"),
    ),
    "jupyter": (
        ("labctl jupyter", "Serve notebooks from worker-0, and print their address"),
        ("labctl jupyter -n worker-1 --port 9000", "Serve them from another node at a port"),
    ),
    "logs": (
        ("labctl logs", "Show the logs of all containers"),
        ("labctl logs worker-1 -f", "Follow the log of a node"),
        ("labctl logs --run latest -f", "Follow the output of the latest run"),
        ("labctl logs --run latest --rank 1 --timestamps", "Show the output of a rank, with times"),
    ),
    "workloads": (
        ("labctl workloads", "List workloads with launcher and description"),
        ("labctl workloads --json", "Print them as JSON, with their metrics and criteria"),
    ),
    "cache": (
        ("labctl cache opt-350m_bs24_zero0", "Download models and datasets of a workload"),
        ("labctl cache --model gpt2 --dataset Dahoas/rm-static", "Download a model and a dataset by name"),
        ("labctl cache --hosts", "Copy all that is downloaded to the hosts"),
        ("labctl cache opt-350m_bs24_zero0 --dry-run", "Show what is missing, with its size"),
    ),
    "fit": (
        ("labctl fit opt-13b", "Tell if a workload fits, and what makes it fit"),
        ("labctl fit opt-13b --nodes 2 --slots 8 --device-memory 80g --host-memory 1t", "Ask of other hardware"),
        ("labctl fit opt-13b --set deepspeed.zero_optimization.stage=3", "Ask of another setting"),
        ("labctl fit opt-13b --explain", "Show each part with its formula"),
    ),
    "run": (
        ("labctl run opt-tiny", "Run a workload, and check its criteria"),
        ("labctl run opt-13b --rehearse", "Try it with a tiny model and few steps first"),
        ("labctl run --script train.py -- --epochs 3", "Run a script of yours; its arguments follow --"),
        (
            "labctl run opt-tiny --timeout 5m --set steps=40 --expect 'throughput>=5'",
            "Change time limit and arguments, and add a criterion",
        ),
    ),
    "attach": (
        ("labctl attach", "Follow the latest run to its end"),
        ("labctl attach -q", "Follow it with a progress bar instead of its output"),
        ("labctl attach -2", "Follow the run before the latest"),
    ),
    "top": (
        ("labctl top", "Watch the latest run that is under way"),
        ("labctl top c3a223", "Watch the run whose id ends in c3a223"),
        ("labctl top --json", "Print the numbers once, as JSON"),
    ),
    "stacks": (
        ("labctl stacks", "Tell where the ranks of the latest run are"),
        ("labctl stacks c3a223", "Show it of the run whose id ends in c3a223"),
    ),
    "stop": (
        ("labctl stop", "Stop the latest run"),
        ("labctl stop c3a223 --grace 60", "Stop a run, and give it a minute to save its state"),
    ),
    "runs": (
        ("labctl runs", "List runs, the latest first"),
        (
            "labctl runs --workload opt-tiny --verdict PASS --since 2d",
            "List runs of opt-tiny that passed in the last two days",
        ),
        ("labctl runs --csv", "Print a table for a spreadsheet, with a column for each metric"),
        ("labctl runs prune --keep 20", "Remove all but the latest 20"),
    ),
    "runs ls": (
        ("labctl runs ls", "List runs, the latest first"),
        ("labctl runs ls --verdict FAIL", "List those that missed their criteria"),
    ),
    "runs prune": (
        ("labctl runs prune --keep 20 --dry-run", "Show which runs would be removed"),
        ("labctl runs prune --keep 20", "Remove all but the latest 20"),
    ),
    "show": (
        ("labctl show", "Show the result of the latest run"),
        ("labctl show -2", "Show that of the run before it"),
        ("labctl show c3a223 --json", "Print the result of the run whose id ends in c3a223, as JSON"),
    ),
    "note": (
        ('labctl note latest "loss diverged after the new data"', "Add a note to the latest run"),
        ("labctl note c3a223", "Print the note of the run whose id ends in c3a223"),
        ('labctl note -1 ""', "Remove the note of the latest run"),
    ),
    "compare": (
        ("labctl compare -2 -1", "Compare the last two runs"),
        ("labctl compare c3a223 9f01b4 latest", "Compare several; runs with the same settings are one group"),
        ("labctl compare -2 -1 --metric throughput", "Compare one metric"),
    ),
    "ui": (
        ("labctl ui", "Serve the pages and print their address"),
        ("labctl ui --open", "Also open them in a browser"),
        ("labctl ui --port 9000", "Serve them on another port"),
    ),
    "report": (
        ("labctl report", "Write a page of the latest run, with its charts as PNG"),
        ("labctl report --open", "Also open it in a browser"),
        ("labctl report -2 -1 --out pages/two", "Write a page that compares two runs to a directory"),
        ("labctl report metrics.csv", "Draw the curves of a script's own metrics"),
    ),
    "export": (
        ("labctl export latest --csv run.csv", "Write the metrics of the latest run for a spreadsheet or pandas"),
        ("labctl export latest --tensorboard logs", "Write them for TensorBoard"),
        ("labctl export c3a223 --mlflow", "Log the run whose id ends in c3a223 to MLflow"),
        ("labctl export latest --junit run.xml", "Write its verdict for a CI server"),
    ),
    "replay": (
        ("labctl replay", "Repeat the latest run"),
        ("labctl replay c3a223 --dry-run", "Show if a run can be repeated, and how"),
    ),
    "freeze": (
        ("labctl freeze", "Write lab.lock"),
        ("labctl freeze --out before-upgrade.lock", "Write another file"),
    ),
    "verify": (
        ("labctl verify", "Show how the lab differs from lab.lock"),
        ("labctl verify before-upgrade.lock", "Show how it differs from another file"),
    ),
    "hostfiles": (
        ("labctl hostfiles --size 2", "Write a hostfile for each pair of the nodes of the lab"),
        ("labctl hostfiles nodes.txt --size 4", "Write one for each four machines of a list"),
        ("labctl hostfiles nodes.txt --size 2 --pattern all-pairs", "Write one for every pair that there can be"),
    ),
    "batch": (
        ("labctl batch opt-tiny hostfiles/2nodes_2xN", "Run a workload on each hostfile of a directory"),
        (
            "labctl batch opt-tiny hostfiles/2nodes_2xN --timeout 10m --repeat 2",
            "Run it twice on each, at most 10 minutes",
        ),
        ("labctl batch opt-tiny hostfiles/2nodes_2xN --resume", "Go on after Ctrl-C"),
    ),
    "bisect": (
        ("labctl bisect opt-tiny", "Find the nodes or links that are slow or fail"),
        ("labctl bisect allreduce --within 20% --drain", "Tolerate 20 %, and note bad nodes in drained.txt"),
        ("labctl bisect matmul --nodes worker-0,worker-1 --min 50", "Test two nodes against a minimum"),
    ),
    "eval": (
        (
            "labctl eval output/2nodes_2xN_opt-tiny --within 10%",
            "Judge a batch: no job more than 10 % below the median of its size",
        ),
        ("labctl eval output/2nodes_2xN_opt-tiny --min 600", "Judge it: each job must reach 600"),
        ("labctl eval logs --pattern 'speed: (\\S+)' --min 5", "Judge logs of other programs by a number in them"),
        ("labctl eval output/2nodes_2xN_opt-tiny --csv jobs.csv --junit jobs.xml", "Write the answer to files, too"),
    ),
    "validate": (
        ("labctl validate", "Validate the hosts in two or three minutes"),
        ("labctl validate --profile full", "Run every check"),
        ("labctl validate --profile quick --print-profile > mine.yml", "Copy a profile, to change it"),
        ("labctl validate --profile mine.yml --out reports/monday", "Use it, and choose where the report goes"),
    ),
    "baseline": (
        ("labctl baseline", "Record the figures of the hosts in baseline.json"),
        ("labctl baseline --profile full --out full.json", "Record those of another profile in another file"),
    ),
    "down": (
        (
            "labctl down",
            "End runs (on a terminal it asks first), remove containers and network; records are kept",
        ),
        ("labctl down --images", "Also remove the image from the hosts of LAB_HOSTS"),
        ("labctl down --dry-run", "Print what would be removed"),
    ),
    "clean": (
        ("labctl clean", "End runs, remove the lab with its keys and rendered files; records are kept"),
        ("labctl clean -C mylab", "Remove the lab of another directory"),
        ("labctl clean --dry-run", "Print what would be removed"),
    ),
}
"""Examples by the command's name, as it is typed."""
