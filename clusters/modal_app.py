"""Train on Modal's machines with the Dockerfile's packages. In the project's folder, after `pip install modal`:

    modal run --detach clusters/modal_app.py::data                       # once: FineWeb-Edu's shards on the volume
    modal run --detach clusters/modal_app.py::train --run-name NAME --flags "--total_batch_size 1048576"

Another machine sees a file of a volume only when its container starts, so several machines need --parallel ddp, where
rank 0 writes whole checkpoints, and a run that diverges does not go back by itself.
"""

import shlex
import subprocess

import modal

MACHINES, GPUS, HOURS = 2, 8, 24

app = modal.App("gpt2", image=modal.Image.from_dockerfile("Dockerfile"))
volume = modal.Volume.from_name("gpt2", create_if_missing=True)
always = dict(volumes={"/shared": volume}, timeout=HOURS * 3600, retries=10, single_use_containers=True)


@app.function(cpu=16, **always)
def data():
    subprocess.run(["python", "fineweb.py", "--out", "/shared/edu_fineweb10B"], cwd="/train-gpt2", check=True)


@app.function(gpu=f"H100:{GPUS}", **always)
@modal.clustered(size=MACHINES, rdma=True)
def train(run_name: str, flags: str = ""):
    """Start or continue a run. Modal calls this again after a preemption, an error or the time limit."""
    cluster = modal.Cluster.from_context()
    first = cluster.container_ips(family="ipv4")[0]
    command = ["torchrun", f"--nnodes={MACHINES}", f"--nproc_per_node={GPUS}", f"--master_addr={first}"]
    command += [f"--node_rank={cluster.container_rank()}", "--master_port=29500", "train_gpt2.py"]
    command += ["--data_dir", "/shared/edu_fineweb10B", "--log_dir", "/shared/log", "--run_name", run_name]
    command += ["--rollbacks", "3" if MACHINES == 1 else "0"]
    torchrun = subprocess.Popen(command + shlex.split(flags), cwd="/train-gpt2")
    try:
        torchrun.wait(HOURS * 3600 - 180)
    finally:
        torchrun.terminate()  # before the time limit, and after Modal's SIGINT: every rank saves and stops
        torchrun.wait()
    if torchrun.returncode:
        raise subprocess.CalledProcessError(torchrun.returncode, command)
