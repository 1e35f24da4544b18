# SPDX-License-Identifier: Apache-2.0
"""Spack's package of jsonargparse with a version that hvdtrain supports; Spack's newest is 4.39."""

from spack.package import *
from spack_repo.builtin.packages.py_jsonargparse.package import PyJsonargparse as BuiltinPackage


class PyJsonargparse(BuiltinPackage):
    """Command line arguments and configuration files from type hints."""

    version("4.49.0", sha256="9e691a09d937fb4c6bc1f6d3bf6c3546efa03381ea1e64ee10759095f1b14da7")

    depends_on("py-setuptools@77:", when="@4.49:", type="build")
