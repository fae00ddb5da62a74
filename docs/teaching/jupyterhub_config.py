"""JupyterHub for a room: one container per learner, from the image of the Containerfile beside it.

Build the image with `--build-arg HUB=jupyterhub==VERSION`, the version of the hub itself, 5.3 or
newer. Then, with node's configurable-http-proxy beside it,

    pip install jupyterhub==VERSION dockerspawner
    docker network create --internal --subnet 172.30.0.0/24 mkref       # no way out
    ROOM_PASSWORD=eight-or-more jupyterhub -f docs/teaching/jupyterhub_config.py

On Kubernetes (Zero to JupyterHub) the same numbers go into `profile_list`, at the end.
"""

import os

c = get_config()  # noqa: F821  (JupyterHub defines it)

CORES, GIGABYTES = 2, 2  # for each learner; see room.md for what was measured
FOLDER = "/home/learner/mkref"

c.JupyterHub.spawner_class = "dockerspawner.DockerSpawner"
# For a closed room and a day: any name with the password of the day, which opens every account.
c.JupyterHub.authenticator_class = "shared-password"
c.SharedPasswordAuthenticator.user_password = os.environ.get("ROOM_PASSWORD")
c.Authenticator.allow_all = True
c.JupyterHub.hub_ip = "0.0.0.0"  # containers have to reach the hub, at this address of the host:
c.JupyterHub.hub_connect_ip = "172.30.0.1"

c.Spawner.cmd = ["jupyterhub-singleuser"]
c.Spawner.default_url = "/lab/tree/notebooks/00_start_here.ipynb"
c.Spawner.notebook_dir = FOLDER
c.Spawner.cpu_limit = CORES
c.Spawner.mem_limit = f"{GIGABYTES}G"
c.Spawner.start_timeout = 120
c.Spawner.environment = {"OMP_NUM_THREADS": "1"}  # small models are faster on one thread

c.DockerSpawner.image = "mkref-workbook"
c.DockerSpawner.pull_policy = "never"  # it was built here
c.DockerSpawner.remove = True
c.DockerSpawner.network_name = "mkref"
c.DockerSpawner.use_internal_ip = True
c.DockerSpawner.volumes = {"mkref-{username}": f"{FOLDER}/notebooks"}  # answers outlive a restart

# KubeSpawner: CPU for everybody, a GPU where the cluster has some. Ignored by DockerSpawner.
c.KubeSpawner.profile_list = [
    {
        "display_name": "CPU: every lesson, recorded GPU times",
        "default": True,
        "kubespawner_override": {"cpu_limit": CORES, "mem_limit": f"{GIGABYTES}G"},
    },
    {
        "display_name": "GPU: the same, and measures for itself",
        "kubespawner_override": {
            "extra_resource_limits": {"nvidia.com/gpu": "1"},
            "mem_limit": "8G",
        },
    },
]
