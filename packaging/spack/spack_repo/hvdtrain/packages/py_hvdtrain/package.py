# SPDX-License-Identifier: Apache-2.0
"""Spack package of hvdtrain."""

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHvdtrain(PythonPackage):
    """Training for PyTorch on clusters that run Horovod and MPI."""

    # hvdtrain is not on PyPI. Name the sdist that `python -m build` writes in a clone:
    # `spack install --no-checksum`, with this file in a mirror or its path here.
    url = "file:///path/to/hvdtrain-0.1.0.tar.gz"

    license("Apache-2.0")

    version("0.1.0")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@68:", type="build")
    with default_args(type=("build", "run")):
        depends_on("py-torch@2.6:")
        depends_on("py-numpy@1.24:")
        depends_on("py-jsonargparse@4.49:4")
        depends_on("py-docstring-parser@0.16:")
        depends_on("py-pyyaml@6:")
        depends_on("py-safetensors@0.4:")
        depends_on("py-tqdm@4.60:")
        depends_on("py-psutil@5.9:")
        depends_on("py-mpi4py@4:")
        depends_on("py-prometheus-client@0.20:")
        depends_on("py-rich@13:")
        depends_on("py-jinja2@3.1:")
