# SPDX-License-Identifier: Apache-2.0
"""Spack package of Horovod with the patches of hvdtrain."""

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHorovodHvdtrain(PythonPackage):
    """Horovod for PyTorch with the patches of the installed hvdtrain."""

    homepage = "https://github.com/horovod/horovod"
    pypi = "horovod/horovod-0.28.1.tar.gz"

    license("Apache-2.0")

    version(
        "0.28.1",
        sha256="92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0",
        expand=False,  # `hvdtrain horovod source` unpacks it
    )

    variant("mpi", default=True, description="Build the MPI controller too")

    build_directory = "patched"

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.13:", type="build")
    depends_on("gmake", type="build")
    depends_on("py-setuptools@68:", type="build")
    depends_on("mpi", when="+mpi", type=("build", "link", "run"))
    with default_args(type=("build", "run")):
        depends_on("python@3.10:")
        depends_on("py-hvdtrain@0.1.0")
        depends_on("py-torch@2.6:")
        depends_on("py-cffi@1.4:")
        depends_on("py-cloudpickle")
        depends_on("py-packaging")
        depends_on("py-psutil")
        depends_on("py-pyyaml")

    @run_before("install")
    def write_patched_source(self):
        hvdtrain = Executable(self.spec["py-hvdtrain"].prefix.bin.hvdtrain)
        archive = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": self.stage.source_path}
        with working_dir(self.stage.source_path):
            hvdtrain("horovod", "source", self.build_directory, extra_env=archive)

    def setup_build_environment(self, env):
        for name in ("WITH_PYTORCH", "WITH_GLOO", "WITHOUT_TENSORFLOW", "WITHOUT_MXNET"):
            env.set(f"HOROVOD_{name}", "1")
        env.set("HOROVOD_WITH_MPI" if self.spec.satisfies("+mpi") else "HOROVOD_WITHOUT_MPI", "1")
        env.set("CMAKE_POLICY_VERSION_MINIMUM", "3.5")
        env.set("MAKEFLAGS", f"-j{make_jobs}")
        # distutils, from which Horovod takes the directory of Python.h, is not in Python 3.12.
        headers = self.spec["python"].headers.directories[0]
        env.append_flags("CXXFLAGS", f"-I{headers}")
